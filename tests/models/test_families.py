"""Every family: logits and continuations of tiny checkpoints, against the published computation.

tools/golden/families.py made the checkpoints.  Their weights are such that logits are of size
1 to 20; both sides compute in float32 (the reference executor in float64), so that 2e-6 of the
largest logit is some ten roundings.  Leaving out any one part of an architecture moves the logits
by 1e-4 of it or more.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import nbflow
from nbflow.checkpoint import open_weights
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.program import build
from nbflow.spec import check, families, resolve
from nbflow_kernels.errors import UsageError

FOLDER = Path(__file__).parents[1] / "golden" / "families"
NAMES = sorted(path.name for path in FOLDER.iterdir())
ENCODERS = ("bert", "distilbert", "roberta")
PAIRS = (
    "bart", "blenderbot", "flan_t5", "m2m_100", "marian", "mbart", "pegasus", "plbart", "t5",
)  # fmt: skip
# What these are made of is compiled and divided among ranks in the tests of others.
BY_REFERENCE = (
    "aria_text", "biogpt", "cohere2_moe", "ctrl", "exaone", "flint", "granitemoe_swa", "openai_gpt",
    "sarvam_moe", "xglm",
)  # fmt: skip
DECODERS = sorted(set(NAMES) - set(ENCODERS) - set(PAIRS))
COMPILED = sorted(set(DECODERS) - set(BY_REFERENCE))
TOLERANCE = 2e-6
# Token by token as in chunks of any size, the errors of this model have a root mean square of
# 2.3e-7 to 2.5e-7 of the largest logit; the largest of 3,880 is within ten of them.
OF_MODEL = {"qwen3_next": 2.5e-6}


def golden(name):
    with np.load(FOLDER / name / "golden.npz") as file:
        return file["ids"], file["logits"], file["continuation"]


def error(a, b):
    return np.abs(a - b).max() / np.abs(b).max()


def reference(path):
    spec = resolve(path).spec
    program = build(spec)
    with open_weights(path) as file:
        check(spec, file)
        return ReferenceExecutor(program, WeightLoader(program, file, None))


@pytest.mark.parametrize("name", DECODERS)
def test_reference_executor_in_pieces(name):
    ids, logits, _ = golden(name)
    executor = reference(FOLDER / name)
    chunks = [executor.logits(ids[a:b]) for a, b in ((0, 7), (7, 8), (8, len(ids)))]
    with np.load(FOLDER / name / "golden.npz") as file:  # LongRoPE: of texts of 7 and 8 tokens
        logits[:8] = file.get("short_logits", logits)[:8]
    assert error(np.concatenate(chunks), logits) < TOLERANCE


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_executor(name):
    """Logits through the KV cache in uneven chunks; continuation batched with another sequence."""
    ids, logits, continuation = golden(name)
    with nbflow.load(FOLDER / name, kv="f32", max_step_tokens=17, threads=1) as model:
        assert error(model.logits(ids), logits) < OF_MODEL.get(name, TOLERANCE)
        mine, _ = model.generate_batch([ids, ids[:5]], max_tokens=len(continuation))
        assert mine.ids == continuation.tolist()


@pytest.mark.parametrize("name", ["mixtral", "nemotron_3_nano", "qwen3_next"])
def test_experts_stacked_as_transformers_5_holds_them(name, tmp_path):
    """Gate and up of all experts in one tensor, down in another; experts without gates have up."""
    tensors, of_layers = load_file(FOLDER / name / "model.safetensors"), {}
    for key in [key for key in tensors if ".experts." in key and "shared" not in key]:
        start, _, end = key.partition(".experts.")
        j, part = end.removesuffix(".weight").split(".")
        role = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(part, part)
        of_layers.setdefault(start, {}).setdefault(role, {})[int(j)] = tensors.pop(key)
    assert of_layers
    for start, roles in of_layers.items():
        stacks = {role: np.stack([each[j] for j in sorted(each)]) for role, each in roles.items()}
        if "gate_proj" in stacks:
            pair = stacks.pop("gate_proj"), stacks.pop("up_proj")
            stacks["gate_up_proj"] = np.concatenate(pair, axis=1)
        tensors |= {f"{start}.experts.{role}": stack for role, stack in stacks.items()}
    if name == "mixtral":
        tensors = {key.replace("block_sparse_moe", "mlp"): each for key, each in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(FOLDER / name / "config.json", tmp_path)
    ids, logits, _ = golden(name)
    assert error(reference(tmp_path).logits(ids), logits) < TOLERANCE


_DIVIDED = {
    "mixtral": {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
    "phi3": {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "renamed"), _DIVIDED.items())
def test_matrices_divided_as_quantizers_store_them(name, renamed, tmp_path):
    """Experts one by one with the names of modules; fused matrices as their parts."""
    tensors, spec = {}, resolve(FOLDER / name).spec
    n_keys = spec.n_kv_heads * spec.head_dim
    for key, value in load_file(FOLDER / name / "model.safetensors").items():
        module = key.split(".")[-2]
        new = renamed.get(module, module)
        if isinstance(new, str):
            tensors[key.replace(f".{module}.", f".{new}.")] = value
            continue
        ends = (-2 * n_keys, -n_keys) if module == "qkv_proj" else (len(value) // 2,)
        ends = [end % len(value) for end in ends]
        for part, rows in zip(new, np.split(value, ends), strict=True):
            tensors[key.replace(f".{module}.", f".{part}.")] = np.ascontiguousarray(rows)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(FOLDER / name / "config.json", tmp_path)
    ids, logits, _ = golden(name)
    assert error(reference(tmp_path).logits(ids), logits) < TOLERANCE


# One of each kind of attention: ALiBi, soft caps, windows, rotation of a part, many heads to a key.
@pytest.mark.parametrize(
    "name", ["falcon_rw", "gemma2", "mistral", "gpt2", "mpt", "cohere2", "falcon_40b", "phi"]
)
def test_keys_and_values_in_formats_of_their_own(name):
    """Values are rounded to 1/254 of the largest of 32: 4e-3, which two layers make 1.3e-2."""
    ids, logits, _ = golden(name)
    found = []
    for budget in (17, 512):
        options = {"kv": "f16/q8_0", "max_step_tokens": budget, "threads": 1}
        with nbflow.load(FOLDER / name, **options) as model:
            found.append(model.logits(ids))
    assert 1e-4 < error(found[0], logits) < 2e-2
    np.testing.assert_array_equal(*found)


STORED_OTHERWISE = ("gpt_oss_floats", "gpt_oss_limit", "llama_fp8")  # other files of such models


@pytest.mark.parametrize("name", sorted({*COMPILED, *ENCODERS} - set(STORED_OTHERWISE)))
@pytest.mark.parametrize("partition", ["0&1", "0;1"])
def test_partitions(name, partition):
    ids, logits, _ = golden(name)
    with nbflow.load(FOLDER / name, kv="f32", partition=partition, threads=1) as model:
        assert error(model.logits(ids), logits) < TOLERANCE


def test_a_stage_begins_with_a_layer_that_selects_keys():
    with pytest.raises(UsageError, match="a stage begins with layer 1, which attends to the keys"):
        nbflow.load(FOLDER / "glm_moe_dsa", partition="0;1;2", threads=1)


def test_every_family_has_a_golden_model():
    used = {resolve(FOLDER / name).spec.family for name in NAMES}
    of_hugging_face = {
        family.name
        for family in families().values()
        if family.model_types and not family.name.endswith(("_gguf", "_ggml", "llama2c"))
    }
    assert used == of_hugging_face
