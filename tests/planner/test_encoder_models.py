"""Predictions for encoders and encoder-decoder models: what is counted is what is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbflow.distributed import make_plan
from nbflow.planner import (
    Device,
    Link,
    Machine,
    Workload,
    best,
    compare,
    planned_model,
    predict,
)
from nbflow.planner.memory import weight_bytes
from nbflow.program import build, build_cross_kv, fuse
from nbflow.program import partition as shard
from nbflow.program.cost import kv_token_bytes
from nbflow_kernels.errors import UsageError

FOLDER = Path(__file__).parents[1] / "golden" / "families"
WORK = Workload(3, 16, 6)


def machine(read: float = 1e11, computed: float = 1e12, link: Link | None = None) -> Machine:
    device = Device("gpu", 1e9, read, {"f32": computed}, op_s=1e-6, step_s=1e-5)
    return Machine("test", (device,) * 4, 4, {"host": link or Link(1e-6, 1e10)})


@pytest.mark.parametrize("name", ["bert", "t5", "m2m_100"])
@pytest.mark.parametrize("partition", ["0", "0;1", "0&1", "0&1;2&3"])
def test_every_part_is_counted(name: str, partition: str) -> None:
    """Whole programs hold what the planner counts from one layer of each kind."""
    model = planned_model(FOLDER / name)
    found = predict(model, partition, machine(), WORK)
    spec, encoder = model.spec, model.spec.encoder
    for i, rank in enumerate(found.ranks):
        mine = make_plan(spec, partition).ranks[i]
        parts = [(build(spec), mine, model)]
        if encoder is not None:
            parts.append((build(encoder), make_plan(encoder, partition).ranks[i], model.encoder))
            parts.append((build_cross_kv(spec), mine, model))
        held = [
            weight_bytes(fuse(shard(program, plan)), of, False).n_bytes
            for program, plan, of in parts
        ]
        assert rank.weight_bytes == sum(held)
        texts = WORK.batch * WORK.prompt
        rooms = [texts] if encoder is None else [WORK.batch * (WORK.generate + 1), texts, texts]
        tokens = [
            room * kv_token_bytes(shard(program, plan), "f16")
            for room, (program, plan, _) in zip(rooms, parts, strict=True)
        ]
        assert rank.kv_bytes == sum(tokens)
        assert rank.workspace_bytes > 0


def test_what_is_drawn_costs_time_only_where_something_is() -> None:
    bert, t5 = (planned_model(FOLDER / name) for name in ("bert", "t5"))
    reads, draws = (predict(m, "0;1", machine(), WORK) for m in (bert, t5))
    assert (reads.decode_s, reads.decode_tokens_per_s, reads.request_s) == (0, 0, reads.prefill_s)
    assert draws.decode_s > 0
    assert draws.bubble > 0.4  # two stages take turns
    longer = predict(t5, "0;1", machine(), Workload(3, 32, 6))
    assert longer.prefill_s > draws.prefill_s
    assert longer.decode_s > draws.decode_s  # more keys of the encoder's states
    assert longer.ranks[0].kv_bytes > draws.ranks[0].kv_bytes


@pytest.mark.parametrize("name", ["bert", "t5"])
@pytest.mark.parametrize("partition", ["0", "0;1", "0&1"])
def test_a_better_machine_is_never_slower(name: str, partition: str) -> None:
    model = planned_model(FOLDER / name)
    before = predict(model, partition, machine(), WORK)
    for better in (machine(read=2e11), machine(computed=2e12), machine(link=Link(1e-7, 1e11))):
        after = predict(model, partition, better, WORK)
        assert after.prefill_s <= before.prefill_s
        assert after.decode_s <= before.decode_s


def test_links_decide_what_is_best_for_texts() -> None:
    model = planned_model(FOLDER / "bert")
    slow, fast = (
        machine(read=1e6, computed=1e6, link=link) for link in (Link(10.0, 1e3), Link(1e-9, 1e12))
    )
    assert best(compare(model, slow, Workload(1, 16))[0], "latency").partition == "0"
    assert "&" in best(compare(model, fast, Workload(1, 16))[0], "latency").partition


def test_texts_that_are_too_long_are_refused() -> None:
    with pytest.raises(UsageError, match="context of the encoder holds"):
        predict(planned_model("facebook_m2m100_418m"), "0", machine(), Workload(1, 2000))
