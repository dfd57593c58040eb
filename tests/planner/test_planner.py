"""Planner: counts agree with the programs, and predictions behave as they must."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from small_models import make_spec

from nbflow import cli
from nbflow.distributed import make_plan
from nbflow.planner import (
    Device,
    Link,
    Machine,
    PlannedModel,
    Rates,
    RunConfig,
    Workload,
    best,
    candidates,
    compare,
    known_machines,
    load_machine,
    machine_toml,
    measure_kernels,
    measure_machine,
    planned_model,
    predict,
    with_shares,
)
from nbflow.planner.auto_partition import _chosen as chosen_partition
from nbflow.planner.memory import buffer_bytes, weight_bytes
from nbflow.planner.rates import like
from nbflow.planner.stage_cost import RankWork
from nbflow.program import build, fuse, partition
from nbflow.program.cost import StepShape, bytes_sent
from nbflow_kernels.errors import UsageError

PARTITIONS = ("0", "0;1", "0&1", "0&1;2&3", "0:3;1", "0:3&1", "2&0;1&3")
DEVICE = Device("gpu", 1e9, 1e11, {"f16": 1e12}, op_s=1e-6, step_s=1e-5)
LINK = Link(1e-5, 1e10)


def machine(n: int = 4, link: Link = LINK, **changes) -> Machine:
    device = dataclasses.replace(DEVICE, **changes)
    return Machine("test", (device,) * n, n, {"host": link} if n > 1 else {})


def model(weights: str | None = None, **changes) -> PlannedModel:
    numbers = {"n_layers": 5, "intermediate_size": 320, "max_context": 4096} | changes
    return PlannedModel(make_spec(**numbers), weights)


# ---- counting -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", PARTITIONS)
@pytest.mark.parametrize("changes", [{}, {"tied_head": True}, {"window": 8, "full_layers": {1, 3}}])
@pytest.mark.parametrize("weights", [None, "q4"])
def test_counted_layers_cost_what_the_whole_program_does(text, changes, weights):
    if "full_layers" in changes:
        changes = changes | {"full_layers": frozenset(changes["full_layers"])}
    planned = model(weights, **changes)
    plan = make_plan(planned.spec, text, planned.block_size)
    step = StepShape(3, 2, 40, 3)
    total = 0
    for rank in plan.ranks:
        work, whole = RankWork(planned, rank), fuse(partition(build(planned.spec), rank))
        for on_device in (False, True):
            assert work.weight_bytes(on_device) == weight_bytes(whole, planned, on_device)
        assert work.sent_bytes(step) == bytes_sent(whole, rank.rank, 6, 3)
        assert work.workspace_bytes(step) == buffer_bytes(whole, planned, "f32", 6, 3, 3)
        total += work.weight_bytes(True).n_bytes
    shapes = planned.spec.tensor_shapes()
    once = sum(np.prod(shape) * planned.bits(name) / 8 for name, shape in shapes.items())
    vectors = sum(np.prod(s) * planned.bits(n) / 8 for n, s in shapes.items() if len(s) == 1)
    tied = 2 * np.prod(shapes["embed.weight"])  # first and last stage hold a shard each
    if weights is None:  # else layouts pad the rows of this small model
        assert once <= total <= once + vectors * len(plan.ranks) + tied


@pytest.mark.parametrize(
    ("window", "chunk"),
    [*((w, None) for w in (None, 1, 3, 7, 100)), *((None, c) for c in (1, 4, 50))],
)
@pytest.mark.parametrize(("new", "context"), [(1, 1), (1, 9), (4, 4), (5, 12)])
def test_pairs_and_keys_are_those_of_a_loop(window, chunk, new, context):
    step = StepShape(2, new, context, 2)
    pairs, keys = 0, set()
    for query in range(context - new, context):
        first = 0 if window is None else max(0, query - window + 1)
        if chunk is not None:
            first = query // chunk * chunk
        pairs += query - first + 1
        keys |= set(range(first, query + 1))
    assert step.pairs((window, chunk)) == 2 * pairs
    assert step.keys((window, chunk)) == 2 * len(keys)


def test_experts_are_read_as_often_as_tokens_need_them():
    planned = planned_model("mixtral_8x7b_instruct", "q4")
    one, many = (
        predict(planned, "0", machine(1), Workload(batch, 16, 16)).decode_s for batch in (1, 512)
    )
    assert one < 0.5 * many  # one token reads 2 of 8 experts, 512 tokens read all of them


# ---- behaviour ------------------------------------------------------------------------------


def test_one_rank_sends_nothing_and_needs_no_link():
    prediction = predict(model(), "0", machine(1), Workload(4, 16, 16))
    assert prediction.ranks[0].sent_bytes_per_token == 0
    assert prediction.all_reduce_share == prediction.bubble == 0


def test_nothing_is_faster_than_reading_the_weights():
    planned = model()
    prediction = predict(planned, "0", machine(1, op_s=0.0, step_s=0.0), Workload(1, 16, 16))
    read = prediction.ranks[0].weight_bytes - planned.spec.vocab_size * 64 * 2  # the embedding
    assert prediction.decode_s >= read / DEVICE.read_bytes_per_s
    assert prediction.decode_s < 2 * read / DEVICE.read_bytes_per_s


@pytest.mark.parametrize("text", PARTITIONS)
@pytest.mark.parametrize(
    "better",
    [
        {"read_bytes_per_s": 2e11},
        {"operations_per_s": {"f16": 2e12}},
        {"op_s": 0.0},
        {"step_s": 0.0},
        {"link": Link(1e-6, 1e10)},
        {"link": Link(1e-5, 1e11)},
    ],
)
def test_a_better_machine_is_never_slower(text, better):
    for workload in (Workload(1, 600, 8), Workload(32, 16, 16)):
        before = predict(model(), text, machine(), workload)
        after = predict(model(), text, machine(**better), workload)
        assert after.prefill_s <= before.prefill_s
        assert after.decode_s <= before.decode_s
        assert (after.prefill_s, after.decode_s) < (before.prefill_s, before.decode_s) or (
            "link" in better and text == "0"
        )


def test_micro_batches_keep_stages_busy_and_cost_a_single_sequence_nothing():
    fast = Link(0.0, 1e12)
    planned = model(n_layers=4, hidden_size=1024, intermediate_size=4096, n_heads=32)
    alone = predict(planned, "0;1", machine(link=fast), Workload(1, 16, 16))
    assert alone.micro_batches == 1
    assert alone.bubble == pytest.approx(0.5, abs=0.02)
    whole = predict(planned, "0;1", machine(link=fast), Workload(512, 16, 16), micro_batches=1)
    halves = predict(planned, "0;1", machine(link=fast), Workload(512, 16, 16))
    assert halves.micro_batches == 2
    assert halves.decode_s < whole.decode_s
    assert halves.bubble < whole.bubble


def test_collectives_as_the_textbook_has_them():
    ring = Link(1e-6, 1e9, "ring").all_reduce_s(4, 4e6)
    assert ring == pytest.approx(6 * (1e-6 + 1e6 / 1e9))
    gather = Link(1e-6, 1e9, "gather").all_reduce_s(4, 4e6)
    assert gather == pytest.approx(1e-6 + 3 * 4e6 / 1e9)
    assert Link(1e-6, 1e9, "best").all_reduce_s(4, 4e6) == ring
    assert Link(1e-6, 1e9, "best").all_reduce_s(4, 4) == pytest.approx(1e-6, rel=0.02)


def test_replicas_share_the_sequences_out():
    planned = model()
    one = predict(planned, "0", machine(), Workload(4, 16, 16))
    two = predict(planned, "0/1", machine(), Workload(8, 16, 16))
    assert two.decode_tokens_per_s == pytest.approx(2 * one.decode_tokens_per_s)
    assert two.kind == "replicas one rank"
    assert len(two.ranks) == 2


def test_products_take_what_was_measured_of_their_format():
    """With infinite memory bandwidth; a format that was not measured takes a similar one's time."""
    of = {"q8_0": 2e9, "q4_0": 4e9, "q4_k": 1e9, "f16": 8e9}
    formats = {
        n: {
            arithmetic: Rates((1, 8), *(((1 / (faster * w), 3 / (faster * w)),) * 3))
            for arithmetic, faster in (("f32", 1), ("int8", 2))
        }
        for n, w in of.items()
    }
    del formats["f16"]["int8"]
    known = {"operations_per_s": {"f32": 1e9, "int8": 1e9}, "weights_per_s": {"f32": 1e6}}
    device = dataclasses.replace(DEVICE, read_bytes_per_s=1e20, **known, formats=formats)
    for name, same, arithmetic, rate in [
        ("q4_0", "q4_0", "f32", 4e9),
        ("q4_0", "q4_0", "int8", 8e9),
        ("q4_b32t1a", "q4_0", "f32", 4e9),  # similar blocks, same bits
        ("q6_k", "q4_k", "f32", 1e9),
        ("f32", "f16", "int8", 8e9),  # computed as float32
    ]:
        assert like(name, formats) == same
        one, eight = (device.matrix_s(1e6, 2e6 * n, name, arithmetic) for n in (1, 8))
        assert one == pytest.approx(1e6 / rate)
        assert eight == pytest.approx(3e6 / rate)
    slow = dataclasses.replace(device, read_bytes_per_s=1e6)
    assert slow.matrix_s(1e6, 2e6, "q4_0", "f32") == pytest.approx(1e6 / 4e9)  # of that memory
    assert slow.matrix_s(1e6, 2e6, "q6_k", "f32") == pytest.approx(6.5625 / 8)  # bits of q6_k
    plain = dataclasses.replace(device, formats={"q4_k": formats["q4_k"]})
    assert plain.matrix_s(1e6, 2e6, "q4_0", "f32") == pytest.approx(1.0 + 2e-3)  # none similar
    # without int8 kernels and without rates of floats, the general ones of float32 count
    assert plain.matrix_s(1e6, 2e6, "f16", "int8") == pytest.approx(1.0 + 2e-3)
    whole = Machine("m", (device,), 1)
    seconds = {w: predict(model(w), "0", whole).decode_s for w in ("q8_0", "q4_0")}
    assert seconds["q4_0"] < seconds["q8_0"]


def test_memory_decides_what_fits():
    planned = model()
    needed = 1e9 - predict(planned, "0", machine(1)).ranks[0].free_bytes
    assert predict(planned, "0", machine(1, memory_bytes=needed)).fits
    tight = machine(2, memory_bytes=needed - 1)
    predictions, _ = compare(planned, tight)
    assert not next(p for p in predictions if p.partition == "0").fits
    assert len(best(predictions, "throughput").ranks) == 2
    with pytest.raises(UsageError, match=r"lacks .* GB; use a smaller weight format"):
        best(compare(planned, machine(2, memory_bytes=1.0))[0], "latency")


def test_cache_on_the_host_moves_bytes_and_costs_time():
    device = {"host_memory_bytes": 1e9, "host_read_bytes_per_s": 1e9}
    here = predict(model(), "0", machine(1, **device), Workload(4, 16, 16))
    there = predict(
        model(), "0", machine(1, **device), Workload(4, 16, 16),
        RunConfig(kv_host=0.5, embedding_on_host=True),
    )  # fmt: skip
    moved = here.ranks[0].kv_bytes * 2 // 5 + 2 * 101 * 64  # two of five layers
    assert there.ranks[0].host_bytes == moved
    assert there.ranks[0].free_bytes == here.ranks[0].free_bytes + moved
    assert there.decode_s > here.decode_s
    with pytest.raises(UsageError, match="host_read_bytes_per_s"):
        predict(model(), "0", machine(1), config=RunConfig(kv_host=0.5))


# ---- choosing -------------------------------------------------------------------------------


def test_candidates_divide_the_ranks():
    texts = list(candidates(4))
    assert len(set(texts)) == len(texts) == 10
    assert {"0", "0&1;2&3", "0&1/2&3", "0;1;2;3", "0/1/2/3"} <= set(texts)
    assert not any("/" in text for text in candidates(4, replicas=False))


def test_replicas_are_taken_for_throughput_where_they_are_best_and_fit():
    planned = model()
    slow = machine(link=Link(1e-2, 1e6))  # an all-reduce costs more than the whole model
    chosen = [chosen_partition(planned, slow, aim, None) for aim in ("latency", "throughput")]
    assert chosen == ["0", "0/1/2/3"]
    used = predict(planned, "0/1/2/3", slow, Workload(32, 512, 128))
    assert used.request_s < predict(planned, "0", slow, Workload(32, 512, 128)).request_s
    needed = 1e9 - min(rank.free_bytes for rank in used.ranks)  # a model, 1/4 of the KV cache
    just, short = (machine(link=slow.links["host"], memory_bytes=needed - n) for n in (0, 1))
    assert chosen_partition(planned, just, "throughput", None) == "0/1/2/3"
    shared = chosen_partition(planned, short, "throughput", None)  # slow, but replicas do not fit
    assert shared.count("/") < 3
    assert predict(planned, shared, short, Workload(32, 512, 128)).fits
    with pytest.raises(UsageError, match="no partition of this machine fits"):
        chosen_partition(planned, machine(memory_bytes=1e5), "throughput", None)


def test_shares_follow_the_devices():
    fast, slow = (dataclasses.replace(DEVICE, read_bytes_per_s=r) for r in (3e11, 1e11))
    uneven = Machine("uneven", (fast, slow), 2, {"host": LINK})
    assert with_shares("0&1", uneven, "speed") == "0:3&1"
    assert with_shares("0;1", uneven, "memory") == "0;1"
    planned = model(n_layers=4)
    even = predict(planned, "0;1", uneven, Workload(1, 16, 16))
    shared = predict(planned, with_shares("0;1", uneven, "speed"), uneven, Workload(1, 16, 16))
    assert [r.layers for r in shared.ranks] == [(0, 3), (3, 4)]
    assert shared.decode_s < even.decode_s


def test_hybrid_is_between_layers_and_tensors_on_four_gpus():
    """Hybrid partitions beat by-layer in latency and by-tensor in throughput."""
    planned = planned_model("llama2_70b", "q4")
    pcie = load_machine("v100x4_pcie")
    of = {
        (text, batch): predict(planned, text, pcie, Workload(batch, 128, 128))
        for text in ("0;1;2;3", "0&1;2&3", "0&1&2&3")
        for batch in (1, 64)
    }
    assert of["0&1;2&3", 1].decode_s < of["0;1;2;3", 1].decode_s
    assert of["0&1;2&3", 64].decode_s < of["0&1&2&3", 64].decode_s


@pytest.mark.parametrize(
    ("name", "kv", "kv_host"),
    [
        ("falcon_40b_instruct", "f16", 1.0),
        ("yi_34b_chat", "q8", 0.5),
        ("aquila_chat2_34b", "q8", 0.5),
    ],
)
def test_34b_and_40b_models_fit_into_24_gb(name, kv, kv_host):
    gpu = load_machine("rtx4090")
    planned = planned_model(name, "q3h")
    workload = Workload(1, 512, 128, context=min(4096, planned.spec.max_context))
    setting = RunConfig(kv=kv, kv_host=kv_host, embedding_on_host=True)
    prediction = predict(planned, "0", gpu, workload, setting)
    assert prediction.fits
    assert prediction.ranks[0].weight_bytes < 24e9
    assert not predict(planned_model(name, "q8"), "0", gpu, workload, setting).fits


# ---- machines and models --------------------------------------------------------------------


@pytest.mark.parametrize("name", known_machines())
def test_packaged_machines_say_where_their_numbers_are_from(name, tmp_path):
    first = load_machine(name)
    assert first.sources
    assert first.description
    (tmp_path / f"{name}.toml").write_text(machine_toml(first))
    again = load_machine(tmp_path / f"{name}.toml")
    assert dataclasses.replace(again, links=first.links) == first
    assert again.links == first.links


def test_rates_of_formats_are_written_and_read_again(tmp_path):
    times = ((1.5, 2.0), (2.0, 3.0), (1.75, 3.0))
    rates = {"q4_0": {"f32": Rates((1, 8), *times), "int8": Rates((1, 8), *times)}}
    fast = dataclasses.replace(DEVICE, formats=rates)
    whole = Machine("m", (fast, DEVICE), 2, {"host": LINK}, "d", ("s",))
    path = tmp_path / "m.toml"
    path.write_text(machine_toml(whole))
    assert load_machine(path) == whole
    text = path.read_text()
    for change, words in (
        (("formats.q4_0", "formats.q4_9"), r"unknown key 'q4_9'"),
        (("q4_0.int8]", "q4_0.int9]"), r"formats\.q4_0: unknown key 'int9'"),
        (
            ("cached_s = [\n    1.5,\n    2.0,\n]\n", ""),
            r"q4_0\.f32\.cached_s must be a list of numbers",
        ),
        (("    1.5,", "    -1.5,"), r"q4_0\.f32\.cached_s must be a number from 0, got -1\.5"),
    ):
        assert change[0] in text
        path.write_text(text.replace(*change, 1))
        with pytest.raises(UsageError, match=words):
            load_machine(path)


def test_more_ranks_than_a_host_has_need_a_network():
    assert len(load_machine("h200x8").with_ranks(32).devices) == 32
    with pytest.raises(UsageError, match=r"no \[links.network\]"):
        load_machine("v100x4_pcie").with_ranks(8)
    with pytest.raises(UsageError, match=r"1..4096"):
        load_machine("h200x8").with_ranks(0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("\nread_bytes_per_s", "\nreads_bytes_per_s"), "did you mean 'read_bytes_per_s'"),
        (("907.0e9", "0.0"), "must be a positive number"),
        (("count = 1", "count = 100000"), "more than 4096"),
        (("f16 =", "f17 ="), "unknown key 'f17'"),
        (('collective = "best"', 'collective = "tree"'), "unknown collective 'tree'"),
        (("memory_bytes = 25770000000.0\n", ""), "memory_bytes is missing"),
        (("[[devices]]", "[devices]"), "must describe at least one device"),
    ],
)
def test_mistakes_in_a_machine_are_named(change, words, tmp_path):
    text = machine_toml(load_machine("rtx4090")).replace("907000000000.0", "907.0e9")
    assert change[0] in text
    path = tmp_path / "bad.toml"
    path.write_text(text.replace(*change, 1))
    with pytest.raises(UsageError, match=words):
        load_machine(path)


def test_a_config_is_enough(tmp_path):
    config = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    for given in (path, tmp_path):
        assert planned_model(given, "q8").spec.n_layers == 2
    assert planned_model("tiny_python").bits("layers.0.attn.q.weight") == 16


# ---- the command ----------------------------------------------------------------------------


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *arguments])
    return int(ended.value.code)


def test_the_command_prints_rows_and_marks_the_best(capsys):
    assert (
        command("llama2_7b", "--weights", "q4", "--machine", "v100x4_pcie", "--batch", "1,64") == 0
    )
    text = capsys.readouterr().out
    assert text.count("<- latency") == text.count("throughput\n") == 2
    assert "does not fit" not in text


def test_the_command_gives_json(capsys):
    arguments = ("llama3.1_405b", "--machine", "h200x8", "--ranks", "16", "--weights", "q4")
    code = command(*arguments, "--partition", "0&1&2&3&4&5&6&7;8&9&10&11&12&13&14&15", "--json")
    assert code == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["n_parameters"] == pytest.approx(405.9e9, rel=1e-3)
    assert [p["workload"]["batch"] for p in facts["predictions"]] == [1, 8, 64]
    assert all(p["fits"] and len(p["ranks"]) == 16 for p in facts["predictions"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["llama2_7b"], "name a --machine"),
        ([], "name a MODEL"),
        (["llama2_7b", "--machine", "v100"], "unknown machine 'v100'"),
        (["llama2_7b", "--machine", "h200x8", "--partition", "0;9"], "names rank 9"),
        (["llama2_7b", "--machine", "h200x8", "--kv-host-percent", "150"], "0..100"),
        (["llama2_7b", "--machine", "h200x8", "--shares", "speed"], "needs a --partition"),
        (["llama2_7b", "--machine", "h200x8", "--activations", "f8"], "unknown arithmetic"),
        (["llama2_7b", "--machine", "h200x8", "--context", "9"], "context must be at least"),
        (["llama2_7b", "--machine", "h200x8", "--prompt", "5000"], "holds 4096"),
        (
            ["facebook_m2m100_418m", "--machine", "h200x8", "--prompt", "5000"],
            "of the encoder holds",
        ),
        (["llama2_7b", "--machine", "h200x8", "--all-reduce", "q7"], "unknown all_reduce"),
        (["--measure", "--ranks", "0"], "the number of ranks must be 1..4096, got 0"),
        (["--measure", "--machine", "h200x8"], "takes no --machine"),
        (["llama2_7b", "--machine", "h200x8", "-o", "x"], "-o is for --measure and --max-kld"),
        (
            ["llama2_7b", "--machine", "amd_epyc_2_cores", "--embeddings-on-host"],
            "an embedding in host memory needs",
        ),
    ],
)
def test_wrong_usage(arguments, words, capsys):
    assert command(*arguments) == 2
    assert words in capsys.readouterr().err


def test_this_machine_can_be_measured(tmp_path, capsys, monkeypatch):
    # checks units, not values
    for name, value in (
        ("STREAMED_BYTES", 1 << 20), ("BUDGET_S", 0.0), ("CURVE_MB", (1, 2)),
        ("ROWS", (1, 8)),
    ):  # fmt: skip
        monkeypatch.setattr(measure_kernels, name, value)
    monkeypatch.setattr(measure_machine, "STEPS", 3)
    monkeypatch.setattr(measure_machine, "ROUNDS", 1)
    path = tmp_path / "mine.toml"
    assert command("--measure", "--ranks", "2", "--weights", "q8_0", "-o", str(path)) == 0
    assert "2 threads of" in capsys.readouterr().out
    measured = load_machine(path)
    assert len(measured.devices) == measured.ranks_per_host == 2
    for device in measured.devices:
        # any core of the last fifteen years; a wrong unit would be off by at least 1e3
        assert 1e8 < device.read_bytes_per_s < 1e12
        assert all(1e8 < rate < 1e13 for rate in device.operations_per_s.values())
        assert 0 < device.step_s <= device.cold_step_s < 1
        ((name, rates),) = device.formats.items()
        assert (name, list(rates)) == ("q8_0", ["f32", "bf16", "int8"])
        for times in rates.values():
            for column in (times.cached_s, times.streamed_s, times.streamed_alone_s):
                # a weight takes at most a few hundred operations' time in the 256 rows
                assert all(1e-13 < seconds < 1e-6 for seconds in column)
        assert 1e8 < device.attention_operations_per_s < 1e13
        assert 1e8 < device.cached_bytes_per_s < 1e13
        for kv in device.kv_formats.values():
            assert all(1e-14 < seconds < 1e-5 for seconds in dataclasses.astuple(kv))
        assert 1e-12 < device.quantize_s < 1e-6
        assert device.cached is not None
        assert device.cached.share[0] == 1.0
    assert 0 < measured.links["host"].latency_s < 1
    assert 0 < measured.links["host"].captured_latency_s < 1  # of threads
    assert 0 < measured.join_s < 1
    assert measured.measurement == measure_machine.VERSION
    predictions, _ = compare(planned_model("tiny_python"), measured, Workload(1, 16, 16))
    assert best(predictions, "latency").fits
