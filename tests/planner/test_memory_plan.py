"""Memory plans agree with the memory that engines take."""

from __future__ import annotations

import contextlib
import gc
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from small_models import write_checkpoint, write_llama

import nbflow
from nbflow.benchmark.timing import time_decode
from nbflow.options import OffloadConfig
from nbflow.planner import planned_model
from nbflow.planner.memory import PAGE_SIZE, model_bytes
from nbflow.planner.memory_plan import RunSize, plan_memory
from nbflow_kernels.cpu import huge_pages
from nbflow_kernels.errors import UsageError

FAMILIES = Path(__file__).parents[1] / "golden" / "families"


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Write a model whose sizes need no padding in any layout, like real ones."""
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
        with nbflow.LLMEngine(model, max_sequences=6, kv_bytes=kv) as engine:
            engine.submit(model.make_request([1, 2, 3], 2, "greedy", 0, True)).result(300)
            taken = model.memory()
            assert engine.limits.max_tokens == plan.kv_tokens == 6 * 192
    assert len(taken) == len(plan.ranks)
    for found, planned in zip(taken, plan.ranks, strict=True):
        assert found["rank"] == planned.rank
        assert found["kv_bytes"] == planned.kv_bytes
        assert found["weight_bytes"] == pytest.approx(planned.weight_bytes, rel=0.02)
        assert found["workspace_bytes"] == pytest.approx(planned.workspace_bytes, rel=0.02)


@pytest.mark.parametrize("partition", ["0", "0;1", "0&1"])
@pytest.mark.parametrize("batch", [1, 17, 40])
def test_a_batch_without_an_engine_to_the_byte(wide, partition, batch):
    """Pages grow from 16 to 32 to 48; a step holds 64 tokens at most; stages share a batch."""
    options = {"partition": partition, "max_step_tokens": 64, "weights": "q8"}
    plan = plan_memory(wide, run=RunSize(batch, 3, 2), **options)
    with nbflow.load(wide, threads=1, **options) as model:
        time_decode(model, 3, 2, batch, 1, 0)
        taken = model.memory()
    for found, planned in zip(taken, plan.ranks, strict=True):
        for key in ("weight_bytes", "kv_bytes", "workspace_bytes"):
            assert found[key] == getattr(planned, key), key
        assert found["kv_bytes"] >= found["kv_used_bytes"] > 0


ENCODERS = ("bert", "distilbert", "roberta")
PAIRS = ("bart", "flan_t5", "m2m_100", "t5")
OTHERS = (
    "mixtral", "qwen2_moe", "deepseek_v2_lite", "gpt2", "bloom", "gemma2", "opt_350m", "phi3_long",
)  # fmt: skip


@pytest.mark.parametrize("name", [*ENCODERS, *PAIRS, *OTHERS])
@pytest.mark.parametrize(
    "options",
    [{}, {"weights": "q3h", "partition": "0;1"}, {"weights": "q8", "activations": "int8"}],
    ids=["as_stored", "by_layer", "int8"],
)
def test_every_kind_of_model_to_the_byte(name, options):
    """Decoders, encoders, both, MoE, MLA; computed tables; padded small sizes."""
    options = {**options, "max_step_tokens": 64}
    plan = plan_memory(FAMILIES / name, max_sequences=3, **options)
    with nbflow.load(FAMILIES / name, threads=1, **options) as model:
        taken = held_after_use(model, plan, name)
    for found, planned in zip(taken, plan.ranks, strict=True):
        for key in ("weight_bytes", "kv_bytes", "workspace_bytes", "host_bytes"):
            assert found[key] == getattr(planned, key), key


@pytest.mark.parametrize("name", ["llama31", "deepseek_v2", "t5"])
@pytest.mark.parametrize("options", [{}, {"weights": "q4", "outliers": 0.01, "kv": "q8_0/f16"}])
def test_bytes_of_a_model_are_those_of_its_plan(name, options):
    plan = plan_memory(FAMILIES / name, **options)
    found = model_bytes(
        planned_model(FAMILIES / name, options.get("weights")),
        options.get("kv", "f16"),
        options.get("outliers", 0.0),
    )
    assert found[0] == plan.ranks[0].weight_bytes
    if name != "t5":  # its plan includes the KV cache of the encoder's states
        assert found[1] * plan.kv_tokens == plan.ranks[0].kv_bytes


def test_formats_of_a_policy_lie_in_matrices_of_their_own(tmp_path):
    """A table with a threshold keeps keys and values in float16."""
    policy = tmp_path / "policy.toml"
    policy.write_text('[formats]\n"*.attn.q.weight" = "q8_0"\n"*" = "q4_0"\n')
    shapes = planned_model(FAMILIES / "llama31").spec.tensor_shapes()
    n_query = math.prod(shapes["layers.0.attn.q.weight"])
    table = {"formats": {"*.attn.q.weight": "q8_0", "*": "q4_0"}, "min_elements": n_query}
    sizes = []
    for weights in (policy, table):
        options = {"weights": weights, "max_step_tokens": 64}
        plan = plan_memory(FAMILIES / "llama31", max_sequences=3, **options)
        with nbflow.load(FAMILIES / "llama31", threads=1, **options) as model:
            (found,) = held_after_use(model, plan, "llama31")
        assert found["weight_bytes"] == plan.ranks[0].weight_bytes
        sizes.append(found["weight_bytes"])
    assert sizes[1] > sizes[0]


TIED = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"quantizer": "hadamard", "weights": "q8"},  # unties the head
        {"quantizer": "hadamard+hqq", "weights": "q4", "partition": "0;1"},
        {"spec": 'family = "llama"\n[override]\nmax_context = 32\n'},
    ],
    ids=str,
)
def test_the_quantizer_and_the_spec_count(options, tmp_path):
    if "spec" in options:
        (tmp_path / "own.toml").write_text(options["spec"])
        options = {**options, "spec": tmp_path / "own.toml"}
    options = {**options, "max_step_tokens": 64}
    folder = tmp_path / "model"
    write_checkpoint(folder, TIED)
    plan = plan_memory(folder, max_sequences=3, **options)
    with nbflow.load(folder, threads=1, **options) as model:
        taken = held_after_use(model, plan, "")
    plain = plan_memory(folder, max_sequences=3, max_step_tokens=64, weights=options.get("weights"))
    assert sum(r.total_bytes for r in plain.ranks) != sum(r.total_bytes for r in plan.ranks)
    for found, planned in zip(taken, plan.ranks, strict=True):
        for key in ("weight_bytes", "kv_bytes", "workspace_bytes"):
            assert found[key] == getattr(planned, key), key


def test_a_quantizer_needs_a_format_in_the_plan_too():
    with pytest.raises(
        UsageError, match="quantizer='hadamard' and importance need a weight format"
    ):
        plan_memory(FAMILIES / "gemma", quantizer="hadamard")
    with pytest.raises(UsageError, match="unknown quantizer 'hadamart'"):
        plan_memory(FAMILIES / "gemma", quantizer="hadamart", weights="q4")


def held_after_use(model, plan, name):
    """Fill the KV cache of the plan, then return the memory of each rank."""
    if name in ENCODERS:
        longest = (np.arange(model.spec.max_context) % 50).tolist()
        model.embed_batch([longest] * plan.max_sequences)
        return model.memory()
    kv = max(engine.storage.page_bytes for engine in model.workers) * plan.kv_tokens // PAGE_SIZE
    prompt = [1, 2, 3]
    if name in PAIRS:
        prompt = (np.arange(model.spec.encoder.max_context) % 50 + 3).tolist()
    with nbflow.LLMEngine(model, max_sequences=plan.max_sequences, kv_bytes=kv) as engine:
        asked = [model.make_request(prompt, 2, "greedy", 0, True) for _ in range(3)]
        for handle in [engine.submit(request) for request in asked]:
            handle.result(300)
        return model.memory()


def test_arrays_take_what_the_counts_say(wide, monkeypatch):
    """Bytes that tracemalloc sees in NumPy arrays agree with the plan within 2 %."""
    monkeypatch.setattr(huge_pages, "LEAST", 1 << 62)  # tracemalloc sees NumPy's memory only
    options = {"weights": "q3h", "kv": "q8_0/q4_0", "max_step_tokens": 128}
    plan = plan_memory(wide, max_sequences=16, **options)
    with nbflow.load(wide, threads=1, **options) as model, engine_of(model, plan):
        pass  # compiles the kernels
    gc.collect()
    tracemalloc.start()
    try:
        with nbflow.load(wide, threads=1, **options) as model, engine_of(model, plan):
            gc.collect()
            arrays = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)]
            )
            taken = sum(trace.size for trace in arrays.traces)
    finally:
        tracemalloc.stop()
    assert taken == pytest.approx(plan.ranks[0].total_bytes, rel=0.02)


@contextlib.contextmanager
def engine_of(model, plan):
    """Yield an engine with the plan's limits after one request."""
    kv = plan.ranks[0].kv_bytes
    with nbflow.LLMEngine(model, max_sequences=plan.max_sequences, kv_bytes=kv) as engine:
        engine.submit(model.make_request([1, 2, 3], 2, "greedy", 0, True)).result(300)
        yield engine


def test_devices_and_the_host_are_counted_apart(wide):
    options = {"weights": "q3h", "kv": "f16", "device": "cuda", "max_sequences": 4}
    (here,) = plan_memory(wide, **options).ranks
    assert here.host_bytes == here.communicator_bytes == 0
    assert 0 < here.graph_bytes < here.step_bytes
    plan = plan_memory(wide, **options, kv_host_percent=50, embeddings_on_host=True)
    (rank,) = plan.ranks
    assert rank.host_bytes == here.kv_bytes // 2 + 1024 * 512 * 4  # one of two layers; the table
    assert rank.device_bytes == here.total_bytes - rank.host_bytes
    assert plan.host_bytes == rank.host_bytes
    assert "on the host" in str(plan)
    first = plan_memory(wide, **options, cpu_layers=1)
    assert first.devices == ("cpu", "cuda")
    assert first.host_bytes == first.ranks[0].total_bytes
    assert first.ranks[0].host_bytes == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("falcon_40b_instruct", {"kv": "q8", "kv_host_percent": 100, "max_context": 1024}),
        ("yi_34b_chat", {"kv": "q8/q4", "kv_host_percent": 50, "max_context": 4096}),
    ],
)
def test_documented_plans_for_24_gb(name, options):
    plan = plan_memory(name, weights="q3h", device="cuda", embeddings_on_host=True, **options)
    text = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    for line in str(plan).splitlines()[:2]:
        assert f"    {line}\n" in text
    assert plan.ranks[0].device_bytes + 1e9 < 24 * 2**30  # 1 GB for unplanned memory


def test_the_table_says_what_changes_nothing(wide):
    plan = plan_memory(wide, kv_host_percent=50, embeddings_on_host=True, kv_bytes=1 << 20)
    assert "kv_host_percent=50, embeddings_on_host have no effect" in str(plan)
    assert "KV for 512 tokens" in str(plan)  # of 2 layers * 2 * 4 heads * 64 * 2 bytes
    assert "note" not in str(plan_memory(wide))
    with pytest.raises(UsageError, match=r"kv_host_percent must be in 0\.\.100"):
        OffloadConfig(101)
    with pytest.raises(UsageError, match="cpu_layers must be in 0"):
        OffloadConfig(cpu_layers=-1)
