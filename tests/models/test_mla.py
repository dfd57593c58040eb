"""Multi-head latent attention: sizes for block formats, and its KV cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_models import make_spec, write_checkpoint

import nbflow
from nbflow.checkpoint import open_weights
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.kv_cache import make_storage
from nbflow.program import build, fuse
from nbflow.program.cost import StepShape, kv_layer_bytes, op_cost
from nbflow.spec import resolve
from nbflow.spec.layer_specs import LatentSpec, RopeSpec
from nbflow_kernels.errors import UsageError

IDS = np.arange(3, 40)
E, H, C, NOPE, ROPE, V = 96, 4, 64, 32, 32, 32
CONFIG = {
    "model_type": "deepseek_v2", "vocab_size": 128, "hidden_size": E, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": H, "max_position_embeddings": 64,
    "kv_lora_rank": C, "q_lora_rank": None, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
    "v_head_dim": V, "n_routed_experts": 0, "moe_intermediate_size": 1, "n_shared_experts": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dense model with latent attention, weights in float16."""
    path = tmp_path_factory.mktemp("latent") / "model"
    write_checkpoint(path, CONFIG, np.float16)
    return path


def reference(folder: Path) -> np.ndarray:
    spec = resolve(folder).spec
    program = build(spec)
    with open_weights(folder) as file:
        return ReferenceExecutor(program, WeightLoader(program, file, None)).logits(IDS)


def logits(folder: Path, **options: object) -> np.ndarray:
    with nbflow.load(folder, threads=1, **options) as model:
        return model.logits(IDS)


def error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def test_the_cache_holds_one_vector_for_each_token(folder: Path) -> None:
    spec = resolve(folder).spec
    storage = make_storage(spec, [0, 1], 16, spec.heads_of, "f16")
    storage.ensure(3)
    assert storage.n_bytes == 2 * 3 * 16 * (C + ROPE) * 2  # layers, pages, tokens, numbers, bytes
    keys, values = storage.layers[1]
    keys[2, 0, 5, :] = np.arange(C + ROPE)
    assert np.array_equal(values[2, 0, 5], np.arange(C))
    storage.ensure(5)
    assert np.array_equal(storage.layers[1][1][2, 0, 5], np.arange(C))
    latent = LatentSpec(48, 0, V, 1e-6)
    odd = make_spec(latent=latent, n_kv_heads=1, rope=RopeSpec("half", 1e4, 16))
    with pytest.raises(UsageError, match=r"48 columns of a latent vector.*whole blocks of 32"):
        make_storage(odd, [0], 16, spec.heads_of, "q8_0")
    with pytest.raises(UsageError, match=r"values of latent attention are part of its keys"):
        make_storage(odd, [0], 16, spec.heads_of, "f16/f32")


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"kv": "f32"}, 2e-6),  # some ten roundings of float32
        ({"kv": "f16"}, 2e-3),  # 2**-11 for each number, in two layers
        ({"kv": "q8_0"}, 2e-2),  # 1/254 of the largest of 32
        ({"kv": "f32", "partition": "0&1&2&3"}, 2e-6),
        ({"kv": "f32", "weights": "q8_0"}, 3e-2),
        ({"kv": "f32", "weights": "q8_0", "activations": "int8"}, 5e-2),
    ],
)
def test_formats(folder: Path, options: dict[str, object], tolerance: float) -> None:
    assert error(logits(folder, **options), reference(folder)) < tolerance


def test_ranks_read_the_heads_they_hold(folder: Path) -> None:
    """Blocks of a head are the ones that one rank alone would hold."""
    whole = logits(folder, kv="f32", weights="q8_0")
    shared = logits(folder, kv="f32", weights="q8_0", partition="0&1")
    assert error(shared, whole) < 2e-6
    spec = resolve(folder).spec
    with nbflow.load(folder, partition="0&1", threads=1) as model:
        read = [m["matrix_bytes"] for m in model.memory()]
    latent = 2 * (C + ROPE) * E * 2  # kv_a of both layers is on both ranks
    layers = sum(
        2 * int(np.prod(shape))
        for name, shape in spec.tensor_shapes().items()
        if len(shape) == 2 and name.startswith("layers.")
    )
    head = 2 * 128 * E
    assert sum(read) == layers + latent + head


def test_what_a_step_costs(folder: Path) -> None:
    """Keys and values are one vector a token; each head's query and sum are as wide as it."""
    spec = resolve(folder).spec
    program = fuse(build(spec))
    assert kv_layer_bytes(program, "f16", 0) == 2 * (C + ROPE)
    shape = StepShape(n_sequences=1, n_new=1, context=10, n_logits=1)
    costs = {op.kind: op_cost(program, op, shape, lambda name: 16, "f16") for op in program.ops}
    assert costs["attention"].attention_operations == 10 * 2 * H * (C + ROPE + C)
    assert costs["heads_linear"].operations == 2 * H * C * V
    assert costs["heads_linear"].weight_bytes == 2 * H * C * V


@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_matrices_of_heads_in_blocks(folder: Path, activations: str, tmp_path: Path) -> None:
    """GGUF files may hold them in blocks; keys lie turned there, and are not converted twice."""
    path = tmp_path / "x.gguf"
    rules = ["*attn_?_b*=q8_0", "*=f16"]
    done = nbflow.quantize_checkpoint(folder, path, "f16", rules=rules)
    formats = {t.name: (t.format, t.shape) for t in done.tensors if "_b." in t.name}
    assert formats["blk.1.attn_k_b.weight"] == ("q8_0", (H, C, NOPE))
    assert formats["blk.1.attn_v_b.weight"] == ("q8_0", (H, V, C))
    found = logits(path, kv="f32", activations=activations)
    # rounding of the activations: to 1/254 of the largest of 32
    assert error(found, reference(path)) < (2e-6 if activations == "f32" else 2e-2)
    # that of the weights: to 1/254 of the largest of 32
    assert error(found, reference(folder)) < 3e-2
