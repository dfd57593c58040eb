"""Expert parallel: the result of one rank, and each rank reads only its experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import write_checkpoint

import nbflow
from nbflow.checkpoint import open_weights
from nbflow.distributed import make_plan
from nbflow.executor import WeightLoader
from nbflow.program import build, fuse, partition
from nbflow.spec import resolve

E, F, S, N = 64, 32, 128, 6
CONFIG = {
    "model_type": "qwen2_moe", "vocab_size": 128, "hidden_size": E, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 64, "num_experts": N, "num_experts_per_tok": 2,
    "moe_intermediate_size": F, "shared_expert_intermediate_size": S, "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
IDS = np.arange(3, 43)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a float16 model with six routed experts and a shared one."""
    path = tmp_path_factory.mktemp("experts") / "model"
    write_checkpoint(path, CONFIG, np.float16)
    return path


@pytest.mark.parametrize("parts", ["0&1", "1&0", "0&1&2&3", "0&1;2&3"])
@pytest.mark.parametrize("weights", [None, "q8_0"])
def test_the_same_as_one_rank(folder: Path, parts: str, weights: str | None) -> None:
    options: dict[str, Any] = {"kv": "f32", "weights": weights, "threads": 1}
    with nbflow.load(folder, **options) as model:
        wanted = model.logits(IDS)
    with nbflow.load(folder, partition=parts, **options) as model:
        # float32 sums of the ranks in another order: some ten roundings
        assert np.abs(model.logits(IDS) - wanted).max() < 2e-6 * np.abs(wanted).max()


def test_each_rank_reads_the_experts_it_holds(folder: Path) -> None:
    spec = resolve(folder).spec
    held, read = [], []
    for rank in make_plan(spec, "0&1&2&3").ranks:
        program = fuse(partition(build(spec), rank))
        with open_weights(folder) as file:
            WeightLoader(program, file, None)
            read.append(file.bytes_read)
        held.append([w.name for op in program.ops if op.kind == "experts" for w in op.weights])
    numbers = [sorted({int(name.split(".")[3]) for name in names}) for names in held]
    assert numbers == [[0, 1], [2, 3], [4], [5]]
    assert all(len(names) == 2 * 3 * len(mine) for names, mine in zip(held, numbers, strict=True))
    per_expert = 2 * 3 * E * F * 2  # layers, matrices, bytes of a float16
    # ranks 0 and 1 hold two experts, 2 and 3 one; other tensors are split evenly
    assert [n - read[2] for n in read] == [per_expert, per_expert, 0, 0]
    with open_weights(folder) as file:
        in_file = sum(file.n_bytes(name) for name in file.names())
    everywhere = sum(  # replicated: norms, routers, gates
        file.n_bytes(name)
        for name in file.names()
        if any(part in name for part in ("norm", "mlp.gate.", "shared_expert_gate"))
    )
    assert sum(read) == in_file + 3 * everywhere + _kv_twice(spec)


def _kv_twice(spec: Any) -> int:
    """Return the bytes of k and v with biases, which two of four ranks replicate."""
    rows = spec.n_kv_heads * spec.head_dim
    return spec.n_layers * 2 * rows * (E + 1) * 2
