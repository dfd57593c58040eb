"""Times of measured machines: planted constants are found in the predictions, counted by hand."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
from small_models import make_spec

from nbflow.planner import (
    CacheCurve,
    CacheRates,
    Device,
    Link,
    Machine,
    PlannedModel,
    Rates,
    RunConfig,
    Workload,
    load_machine,
    machine_toml,
    measure_machine,
    predict,
)
from nbflow.planner.stage_cost import OpWork, seconds_of
from nbflow.program.cost import OpCost
from nbflow.quantization.policy import WeightFormats
from nbflow_kernels.errors import UsageError

BATCH, CONTEXT = 4, 24
WORKLOAD = Workload(BATCH, CONTEXT - 4, 8)  # decode steps are costed at their mean context
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, WIDTH, VOCAB = 4, 64, 320, 8, 4, 32, 101
LAYER_WEIGHTS = HIDDEN * WIDTH * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * FFN
WEIGHTS = LAYERS * LAYER_WEIGHTS
HEAD = HIDDEN * VOCAB
CACHE_BYTES = BATCH * CONTEXT * LAYERS * KV_HEADS * 2 * WIDTH * 2  # f16
ROWS = (1.0, 4.0, 16.0)
FREE = 1e-30
"""Seconds that do not count; times must be positive."""


def rates(cached: float = FREE, streamed: float = FREE, alone: float = FREE) -> Rates:
    """Return times in proportion to the rows."""
    return Rates(ROWS, *(tuple(r * t for r in ROWS) for t in (cached, streamed, alone)))


def device(**changes) -> Device:
    """Return a device on which everything but the changes is free."""
    free = {"int8": rates()}
    plain = Device(
        "cpu", 1e12, 1e30, {"int8": 1e30, "f32": 1e30},
        formats={"q4_0": free, "q8_0": free, "f16": {"f32": rates()}},
        kv_formats={"f16": CacheRates(FREE, FREE, FREE)},
        attention_operations_per_s=1e30, buffer_bytes_per_s=1e30,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def machine(n: int = 2, link: Link | None = None, join_s: float = 0.0, **changes) -> Machine:
    links = {"host": link or Link(0.0, 1e30, "gather")} if n > 1 else {}
    return Machine("test", (device(**changes),) * n, n, links, join_s=join_s)


def model(weights: str | WeightFormats = "q4_0") -> PlannedModel:
    return PlannedModel(
        make_spec(n_layers=LAYERS, intermediate_size=FFN, max_context=4096), weights
    )


def decode_s(partition: str = "0", workload: Workload = WORKLOAD, weights="q4_0", **changes):
    n = 1 if partition == "0" else 2
    config = RunConfig(kv="f16", activations="int8")
    return predict(model(weights), partition, machine(n, **changes), workload, config).decode_s


OPS = 3 + 1 + LAYERS * 10
"""Embedding, rows of the head, last norm and head; per layer two norms, four linear ops, RoPE,
append, attention and gate."""
QUANTIZED = BATCH * LAYERS * (2 * HIDDEN + HEADS * WIDTH + FFN)
"""Activations before q/k/v, o, gate/up and down; the head has float weights."""


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"op_s": 2e-6}, OPS * 2e-6),
        ({"quantize_s": 3e-10}, QUANTIZED * 3e-10),
        ({"burst_step_s": 5e-6}, 5e-6),
        ({"step_s": 1e-4, "sequence_s": 2e-5}, 1e-4 + 3 * 2e-5),
        ({"attention_item_s": 1e-6}, BATCH * KV_HEADS * LAYERS * 1e-6),
        ({"attention_vector_s": 1e-7}, BATCH * HEADS * LAYERS * 1e-7),
        (
            {"attention_operations_per_s": 1e9},
            4 * WIDTH * HEADS * LAYERS * BATCH * CONTEXT / 1e9,
        ),
        (
            {"kv_formats": {"f16": CacheRates(1e-8, 2e-10, 3e-9)}},
            BATCH * LAYERS * KV_HEADS * 2 * (CONTEXT * (1e-8 + WIDTH * 2e-10) + WIDTH * 3e-9),
        ),
        ({"read_bytes_per_s": 1e9, "read_alone_bytes_per_s": 2e9}, None),
        (
            {"formats": {"q4_0": {"int8": rates(alone=1e-9)}, "f16": {"f32": rates(alone=3e-9)}}},
            BATCH * (WEIGHTS * 1e-9 + HEAD * 3e-9),
        ),
    ],
)
def test_a_step_of_one_rank_is_the_sum_of_its_parts(changes, wanted):
    """Each planted constant alone; memory is read by attention and by the embedding."""
    if wanted is None:
        embedding = BATCH * HIDDEN * 2  # f16
        norms = (2 * LAYERS + 1) * HIDDEN * 4
        wanted = (CACHE_BYTES + embedding + norms) / 2e9
    assert decode_s(**changes) == pytest.approx(wanted, rel=1e-9)  # sums of 50 numbers


def test_the_parts_of_a_step_add_up():
    parts = [
        {"op_s": 2e-6}, {"quantize_s": 3e-10}, {"attention_item_s": 1e-6},
        {"formats": {"q4_0": {"int8": rates(alone=1e-9)}, "f16": {"f32": rates()}}},
    ]  # fmt: skip
    together = {key: value for part in parts for key, value in part.items()}
    alone = sum(decode_s(**part) for part in parts)
    assert decode_s(**together) == pytest.approx(alone, rel=1e-9)


def test_each_matrix_of_a_fused_op_has_its_format():
    """q, k and v are one op, with formats of their own."""
    formats = {
        "q4_0": {"int8": rates(alone=1e-9)}, "q8_0": {"int8": rates(alone=5e-9)},
        "f16": {"f32": rates()},
    }  # fmt: skip
    mixed = WeightFormats((("*.attn.k.weight", "q8_0"), ("*", "q4_0")), {})
    k = LAYERS * HIDDEN * KV_HEADS * WIDTH
    wanted = BATCH * ((WEIGHTS - k) * 1e-9 + k * 5e-9)
    assert decode_s(weights=mixed, formats=formats) == pytest.approx(wanted, rel=1e-9)


def test_caches_keep_a_share_of_what_a_step_reads():
    """The share is that of all bytes that the rank reads in a step, and weighs the two times."""
    planted = rates(cached=1e-9, alone=4e-9)
    formats = {"q4_0": {"int8": planted}, "f16": {"f32": rates()}}
    embedding, norms = BATCH * HIDDEN * 2, (2 * LAYERS + 1) * HIDDEN * 4
    n_bytes = WEIGHTS * 4.5 / 8 + HEAD * 2 + CACHE_BYTES + embedding + norms
    new = BATCH * LAYERS * KV_HEADS * 2 * WIDTH * 2  # written by append_kv
    curve = CacheCurve((0.0, 2 * (n_bytes + new)), (1.0, 0.0))  # half of it
    found = decode_s(formats=formats, cached=curve)
    assert found == pytest.approx(BATCH * WEIGHTS * 2.5e-9, rel=1e-9)


def test_ranks_share_the_bandwidth_of_memory():
    """Replicas read at once; with one sequence, one of them, or one stage of a pipeline, reads."""
    planted = rates(streamed=3e-9, alone=1e-9)
    formats = {"q4_0": {"int8": planted}, "f16": {"f32": rates()}}
    one = Workload(1, CONTEXT - 4, 8)
    for partition, workload, wanted in (
        ("0/1", WORKLOAD, BATCH / 2 * WEIGHTS * 3e-9),
        ("0/1", one, WEIGHTS * 1e-9),
        ("0;1", one, WEIGHTS * 1e-9),
        ("0&1", one, WEIGHTS / 2 * 3e-9),
        ("0;1", WORKLOAD, 2 * BATCH / 2 * WEIGHTS / 2 * 3e-9),
    ):
        found = decode_s(partition, workload, formats=formats)
        assert found == pytest.approx(wanted, rel=1e-9), (partition, workload)


def test_pipelines_of_threads_fill_and_drain_in_every_step():
    """Two stages of two layers and two micro-batches: of processes two stage times, else three.

    The first and the last of the three have the memory alone.
    """
    formats = {"q4_0": {"int8": rates(streamed=3e-9, alone=1e-9)}, "f16": {"f32": rates()}}
    stage_weights = BATCH / 2 * WEIGHTS / 2
    found = decode_s("0;1", formats=formats)
    assert found == pytest.approx(2 * stage_weights * 3e-9, rel=1e-9)
    joined = decode_s("0;1", formats=formats, join_s=1e-3)
    assert joined == pytest.approx(stage_weights * (1e-9 + 3e-9 + 1e-9) + 1e-3, rel=1e-9)


def test_threads_run_host_code_in_turn_and_slower_after_large_steps():
    """Python's lock: a tensor parallel step waits for the host code of both ranks."""
    host = {"step_s": 1e-4, "sequence_s": 2e-5}
    assert decode_s("0&1", **host) == pytest.approx(1.6e-4, rel=1e-9)
    assert decode_s("0&1", join_s=1e-6, **host) == pytest.approx(2 * 1.6e-4 + 1e-6, rel=1e-9)
    half = CacheCurve((1.0,), (0.5,))
    assert decode_s(cold_step_s=3e-4, **host) == pytest.approx(3e-4 + 6e-5, rel=1e-9)
    assert decode_s(cold_step_s=3e-4, cached=half, **host) == pytest.approx(2.6e-4, rel=1e-9)


def test_a_disturbed_round_does_not_count():
    """Medians of three rounds, number by number, in tables of tables."""
    curve, slow = CacheCurve((1e6, 2e6), (1.0, 0.5)), CacheCurve((1e6, 2e6), (0.2, 0.1))
    fast, usual, late = (
        (device(cached=c, step_s=s, formats={"q4_0": {"int8": rates(s)}}), Link(s, 1e9), "host")
        for c, s in ((curve, 1e-4), (slow, 3e-4), (curve, 2e-4))
    )
    found, link, name = measure_machine._merged([fast, usual, late], statistics.median)
    assert (found, link, name) == (
        device(cached=curve, step_s=2e-4, formats={"q4_0": {"int8": rates(2e-4)}}),
        Link(2e-4, 1e9),
        "host",
    )


def test_products_write_their_results():
    one = OpCost(weights=1.0, operations=2.0)
    work = OpWork("linear", one, (("q4_0", 1.0),), written_bytes=4000.0)
    found = seconds_of(work, device(buffer_bytes_per_s=1e9), RunConfig(), alone=True)
    assert found == pytest.approx(4e-6, rel=1e-9)


def test_exchanges_take_the_latency_of_the_link():
    """Tensor parallel: two all-reduces per layer, the embedding's, the logits, the tokens."""
    link = Link(1e-4, 1e30, "gather")
    assert decode_s("0&1", link=link) == pytest.approx((2 * LAYERS + 3) * 1e-4, rel=1e-9)
    one = Workload(1, CONTEXT - 4, 8)
    assert decode_s("0;1", one, link=link) == pytest.approx(2 * 1e-4, rel=1e-9)
    captured = dataclasses.replace(link, captured_latency_s=1e-6)  # all but the tokens
    wanted = (2 * LAYERS + 2) * 1e-6 + 1e-4
    assert decode_s("0&1", link=captured) == pytest.approx(wanted, rel=1e-9)


def test_a_pipeline_divides_a_batch_of_prompts():
    """Two stages: a half of the prompts is in the second one while the first has the other."""
    formats = {"q4_0": {"int8": rates(1e-9, 1e-9, 1e-9)}, "f16": {"f32": rates()}}
    config = RunConfig(kv="f16", activations="int8")
    whole, half = (
        predict(model(), "0;1", machine(2, formats=formats), Workload(n, 16, 8), config).prefill_s
        for n in (4, 2)
    )
    one_step = 2 * 16 * WEIGHTS / 2 * 1e-9  # of two prompts on a stage; the link takes no time
    assert whole == pytest.approx(3 * one_step, rel=1e-9)
    assert half == pytest.approx(1.5 * one_step, rel=1e-9)


@pytest.mark.parametrize("partition", ["0", "0;1", "0&1", "0/1"])
def test_times_grow_with_batch_context_and_bytes(partition):
    """More sequences, keys or bits never take less."""
    formats = {
        name: {"int8": rates(b * 1e-12, 4 * b * 1e-12, 2 * b * 1e-12)}
        for name, b in (("q4_0", 4.5), ("q8_0", 8.5))
    }
    formats["f16"] = {"f32": rates(1e-11, 4e-11, 2e-11)}
    changes = {
        "formats": formats, "cached": CacheCurve((1e4, 1e6), (1.0, 0.0)), "step_s": 1e-4,
        "sequence_s": 1e-5, "kv_formats": {"f16": CacheRates(1e-9, 1e-11, 1e-10)},
        "read_bytes_per_s": 1e10, "cached_bytes_per_s": 9e10, "join_s": 1e-4,
    }  # fmt: skip
    times = [decode_s(partition, Workload(b, 16, 8), **changes) for b in (1, 2, 3, 4, 6, 8, 16, 40)]
    assert times == sorted(times)
    times = [decode_s(partition, Workload(4, p, 8), **changes) for p in (1, 16, 64, 512)]
    assert times == sorted(times)
    assert decode_s(partition, **changes) < decode_s(partition, weights="q8_0", **changes)


def test_rates_between_and_beyond_the_measured_rows():
    found = Rates((1, 4, 8), (1.0, 2.0, 4.0), (3.0, 3.0, 5.0), (2.0, 2.0, 4.0))
    assert found.seconds(10, 1, 0.0, alone=False) == 30
    assert found.seconds(10, 1, 0.0, alone=True) == 20
    assert found.seconds(10, 1, 0.5, alone=False) == 20
    assert found.seconds(10, 6, 0.0, alone=False) == 40
    assert found.seconds(10, 24, 0.0, alone=False) == 150
    slow = dataclasses.replace(found, streamed_s=(0.5, 1.0, 2.0))
    assert slow.seconds(1, 4, 0.0, alone=False) == 2.0  # memory is never faster than the caches


def test_measured_machines_are_written_and_read_again(tmp_path):
    whole = dataclasses.replace(
        machine(
            2, Link(1e-4, 1e9, "gather"), 3e-4, step_s=1e-4, sequence_s=2e-5, op_s=1e-7,
            cached=CacheCurve((1e6, 2e6), (1.0, 0.5)), cached_bytes_per_s=9e10, quantize_s=4e-10,
            attention_item_s=1e-7, attention_vector_s=2e-8,
        ),
        measurement=2,
    )  # fmt: skip
    path = tmp_path / "m.toml"
    path.write_text(machine_toml(whole))
    assert load_machine(path) == whole
    text = path.read_text()
    for old, new, words in (
        ("share = [", "shares = [", r"cached: unknown key 'shares'"),
        ("1000000.0,", "3000000.0,", r"cached\.n_bytes must ascend"),
        ("    0.5,\n", "", r"cached: n_bytes and share must have equally many"),
        ("    0.5,\n", "    1.5,\n", r"cached\.share must be 0\.\.1"),
        ("row_s = 1e-30\n", "", r"kv_formats\.f16: row_s is missing"),
        ("kv_formats.f16", "kv_formats.f17", r"kv_formats: unknown key 'f17'"),
        ("join_s = 0.0003", "join_s = -1.0", r"join_s must be a number"),
        ("    16.0,\n", "", r"must have equally many"),
        ("rows = [\n", "rows = 3\nrow = [\n", r"unknown key 'row'"),
    ):
        assert old in text, old
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(UsageError, match=words):
            load_machine(path)
