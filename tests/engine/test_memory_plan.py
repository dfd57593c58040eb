"""What is planned is what an engine then takes."""

from __future__ import annotations

import pytest
from specs import write_llama

import nbflow
from nbflow.engine.memory_plan import Placement, plan_memory
from nbflow_kernels.errors import UsageError


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Return a model whose sizes are multiples of what layouts round up to, as a real one's are."""
    folder = tmp_path_factory.mktemp("wide")
    write_llama(
        folder, n_layers=2, hidden_size=512, intermediate_size=1024, n_heads=8, n_kv_heads=4,
        head_dim=64, vocab_size=1024, max_context=256,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("partition", ["0", "0;1", "0&1"])
@pytest.mark.parametrize(
    "options",
    [
        {"weights": None},
        {"weights": "q8", "kv": "q8_0", "activations": "int8"},
        {"weights": "q3h"},
        {"weights": "f16", "kv": "f32"},
    ],
    ids=str,
)
def test_within_two_percent(wide, options, partition):
    plan = plan_memory(
        wide, partition=partition, max_sequences=6, max_step_tokens=128, max_context=192, **options
    )
    with nbflow.load(
        wide, partition=partition, max_step_tokens=128, max_context=192, threads=1, **options
    ) as model:
        kv = max(r.kv_bytes for r in plan.ranks)
        with nbflow.Engine(model, max_sequences=6, kv_bytes=kv) as engine:
            engine.submit(model.make_request([1, 2, 3], 2, "greedy", 0, True)).result(300)
            taken = model.memory()
            assert engine.limits.max_tokens == plan.kv_tokens == 6 * 192
    assert len(taken) == len(plan.ranks)
    for found, planned in zip(taken, plan.ranks, strict=True):
        assert found["rank"] == planned.rank
        assert found["kv_bytes"] == planned.kv_bytes
        assert found["weight_bytes"] == pytest.approx(planned.weight_bytes, rel=0.02)
        assert found["workspace_bytes"] == pytest.approx(planned.workspace_bytes, rel=0.02)


def test_the_table_says_what_changes_nothing(wide):
    plan = plan_memory(wide, placement=Placement(50, True, 0), kv_bytes=1 << 20)
    assert "kv_host_percent=50, embeddings_on_host change nothing" in str(plan)
    assert "KV for 512 tokens" in str(plan)  # of 2 layers * 2 * 4 heads * 64 * 2 bytes
    assert "note" not in str(plan_memory(wide))
    with pytest.raises(UsageError, match=r"kv_host_percent must be in 0\.\.100"):
        Placement(101)
    with pytest.raises(UsageError, match="cpu_layers must be at least 0"):
        Placement(cpu_layers=-1)
