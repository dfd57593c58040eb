"""Decode steps of MLA models: number of kernels, and the bits of the unfused ops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import write_checkpoint

import nbflow
import nbflow_kernels as nk
from nbflow.engine.worker_step import worker_step
from nbflow_kernels.quantized_matmul import cuda as products
from nbflow_ptx.cupy_stand_in.state import State

pytestmark = pytest.mark.compiler
CONFIG = {
    "model_type": "deepseek_v2", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 3, "max_position_embeddings": 64,
    "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "n_routed_experts": 0, "moe_intermediate_size": 1, "n_shared_experts": 0,
}  # fmt: skip
IDS = list(range(3, 12))


@pytest.mark.parametrize(
    ("q_rank", "in_blocks", "n_kernels"),
    [
        # embedding and head; queries and latent vector, W_uk, attention, W_uv, output, network
        (None, True, 2 + 5 + 2),
        # a head of floats; the queries' own product, and floats of heads are staged first
        (32, False, 5 + 8 + 2),
    ],
)
def test_kernels_of_a_step_and_its_bits(
    q_rank: int | None, in_blocks: bool, n_kernels: int, cupy: Any, tmp_path: Path
) -> None:
    """Fused kernels take at most eight tokens."""
    folder = tmp_path / "model"
    write_checkpoint(folder, {**CONFIG, "q_lora_rank": q_rank}, np.float16)
    options: dict[str, Any] = {"device": "emulator", "kv": "f16"}
    if in_blocks:
        nbflow.quantize_checkpoint(folder, tmp_path / "x.gguf", "q8_0", rules=["*=q8_0"])
        folder = tmp_path / "x.gguf"
    else:
        options["weights"] = "q8_0"
    with nbflow.load(folder, max_step_tokens=9, **options) as model:
        whole = model.logits(IDS)
    with nbflow.load(folder, **options) as model:
        (engine,) = model.workers
        engine.table.add(0)
        for token, row in zip(IDS[:3], whole, strict=False):
            before = State.n_launches
            engine.run_step(worker_step(engine, [0], [[token]], [0]))
            n_launches = State.n_launches - before
            assert engine.executor.buffer("logits", 1)[0].tobytes() == row.tobytes()
        assert engine.executor.steps_by_graph == 2
    assert n_launches == n_kernels


@pytest.mark.parametrize("n_columns", [32, 320, 600])  # 1, 2 and 3 units
def test_batched_product_has_the_bits_of_single_products(n_columns: int, cupy: Any) -> None:
    rng = np.random.default_rng(n_columns)
    w = rng.standard_normal((3, 40, n_columns), dtype=np.float32)
    x = cupy.asarray(rng.standard_normal((2, 3, n_columns + 7), dtype=np.float32))[..., :n_columns]
    stack = nk.quantize(w, "q8_0", quantizer="reference").to_device(x)
    out = cupy.empty((2, 3, 48), np.float32)[..., :40]
    assert products.batched(x, stack, "f32", out)
    stack.drop_storage()
    for h, matrix in enumerate(stack.matrices()):
        assert out[:, h].get().tobytes() == nk.qmatmul(x[:, h], matrix).get().tobytes()
