"""Measuring tools run at a tiny size and write results incrementally."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import nbflow
import nbflow_kernels as nk
from nbflow_kernels.cpu import isa
from nbflow_kernels.quantized_matmul.int8_activations import Int8Rows, quantize_activations

TOOLS = Path(__file__).parents[2] / "tools" / "measure"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))

    def run(name, *words):
        module = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        module.main()
        return module

    return run


def test_speculation(tool, tmp_path, capsys):
    out = tmp_path / "speculation.json"
    words = ["--draft", "tiny_python", "--new", 12, "--repeats", 1, "--threads", 1, "-o", out]
    tool("speculation", "tiny_python", "--n-draft", "2", "--texts", "2", *words)
    ngram, model = json.loads(out.read_text())["rows"]
    assert (ngram["draft"], model["draft"]) == ("ngram", "tiny_python")
    assert model["acceptance_rate"] == 1.0  # it is the model itself
    # 11 tokens after the first of each text, two of three from the draft: at most 2 in a step
    assert 1.5 < model["accepted_per_step"] <= 2
    assert model["bound_ideal"] == 1 + model["accepted_per_step"]
    cost = model["verify_step_over_step"] + 2 * model["draft_step_over_step"]
    assert model["bound_measured"] == pytest.approx(model["bound_ideal"] / cost)
    assert ngram["draft_step_over_step"] == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    with pytest.raises(SystemExit, match="no time"):
        tool("speculation", "tiny_python", "--seconds", "1e-9", "--threads", 1)


def test_batching(tool, tmp_path):
    out = tmp_path / "batching.json"
    words = ["--requests", 2, "--new", 4, "--steps", "16,64", "--others", 2, "--repeats", 1]
    tool("batching", "tiny_python", "--threads", 1, "-o", out, *words)
    made = json.loads(out.read_text())
    assert [row["requests"] for row in made["throughput"]] == [2]
    assert [row["step_tokens"] for row in made["chunks"]] == [16, 64]
    assert all(r["token_s_longest"] >= r["token_s_usual"] > 0 for r in made["chunks"])
    shared = [(row["shared_tokens"], row["cached_tokens"]) for row in made["prefix"]]
    length = made["prefix"][0]["prompt"]
    assert shared[0] == (0, 0)
    assert shared[-1] == (length, length - 1)  # the last token is always computed
    assert all(s - 64 < c <= s for s, c in shared)
    assert made["overhead"][0]["python_us_per_step"] > 0
    assert not list(tmp_path.glob("*.part"))


def test_attention(tool, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(TOOLS))
    measure_attention = importlib.import_module("attention")
    monkeypatch.setattr(measure_attention, "read_bandwidth", lambda threads: 1e9)
    words = ["--keys", 70, "--repeats", 1]
    tool("attention", tmp_path, "variants", "skew", "pages", *words)
    made = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    tests = [row["test"] for row in made]
    assert len(tests) == len(set(tests)) == 8 + 2 + 14
    assert tests[0] == "causal, 1 rows, 70 keys"
    assert "pages of 64, HND, 70 keys" in tests
    assert all(row["variant_over_built_in"] > 0 for row in made[:8])
    assert all(row["static_over_plan"] > 0 for row in made[8:10])
    assert all(row["share"] == round(row["gb_per_s"], 3) or row["share"] > 0 for row in made[10:])


def test_published_rows_are_appended(tool, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(TOOLS))
    published = importlib.import_module("published_rows")
    measure_server = importlib.import_module("http_server")

    def rows(test, x):
        return lambda: [{"test": test, "server": s, "x": x, "y_samples": [1]} for s in "ab"]

    facts = published.conditions()
    assert facts["commit"][:8] in facts["measurement"]
    first = measure_server.Results(tmp_path / "new", facts, "c")
    first.measure("c1", rows("c1", 1.0))
    first.measure("c8", rows("c8", 2.0))
    first.measure("prefix 64", lambda: pytest.fail("it is not asked for"))
    again = measure_server.Results(tmp_path / "new", {**facts, "model": "m"}, "")
    again.measure("c1", rows("c1", 3.0))
    file = tmp_path / "new" / "rows.jsonl"
    made = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["x"] for r in made] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert {"commit", "packages", "processor", "load_average_at_start", "measured"} <= set(made[0])
    assert all(r["stolen_share"] is None or 0 <= r["stolen_share"] < 1 for r in made)
    newest = published.latest(file, "test", "server")
    assert [(r["test"], r["server"], r["x"]) for r in newest] == [
        ("c1", "a", 3.0), ("c1", "b", 3.0), ("c8", "a", 2.0), ("c8", "b", 2.0)
    ]  # fmt: skip
    assert published.latest(tmp_path / "missing.jsonl", "test") == []


def test_what_the_server_s_measurements_ask(tool, server, monkeypatch):
    """The clients of the tool against a server of the tests, with prompts of its vocabulary."""
    monkeypatch.syspath_prepend(str(TOOLS))
    measure_server = importlib.import_module("http_server")
    monkeypatch.setattr(measure_server, "NEW", 4)
    port = int(server.url.rsplit(":", 1)[1])
    peer = measure_server.Peer("nbflow", server.process, port, 2048)
    settings = SimpleNamespace(requests=2, repeats=1)
    (row,) = measure_server.throughput([peer], 2, settings)
    assert (row["test"], row["server"]) == ("c2", "nbflow")
    assert row["tokens_per_s"] > 0
    assert 0 < row["first_token_s_p50"] <= row["first_token_s_p95"]
    (row,) = measure_server.shared([peer], 64, settings)
    assert (row["test"], row["server"]) == ("shared 64", "nbflow")
    assert min(row["first_token_s_new"], row["first_token_s_seen"]) > 0
    before = measure_server.iteration_s(peer)
    measure_server.clients(peer, 1, 1, seed=0)
    assert measure_server.iteration_s(peer) > before > 0


def test_steps_that_sleep(tool, monkeypatch):
    """Sleeping steps keep the number of tokens and steps."""
    monkeypatch.syspath_prepend(str(TOOLS))
    idle_steps = importlib.import_module("scheduling_overhead")
    measure_server = importlib.import_module("http_server")
    monkeypatch.setattr(measure_server, "NEW", 5)
    times = [(1, 0.01), (3, 0.03)]
    assert [idle_steps.seconds_of(times, n) for n in (1, 2, 3, 5)] == pytest.approx(
        [0.01, 0.02, 0.03, 0.05]
    )
    with nbflow.load("tiny_python", threads=1) as model:
        wanted = model.generate([1, 2, 3], max_tokens=5, ignore_eos=True).ids
        with idle_steps.idle(times):
            sample, in_steps = measure_server.in_engine(model, [[1, 2, 3], [4, 5]], 2)
            idle = model.generate([1, 2, 3], max_tokens=5, ignore_eos=True).ids
        # 5 tokens of the prompts together (0.05 s), then four steps of two tokens (0.02 s)
        assert (sample.tokens, len(idle)) == (10, 5)
        assert 0.13 <= in_steps <= sample.seconds
        assert model.generate([1, 2, 3], max_tokens=5, ignore_eos=True).ids == wanted


def test_invariance(tool, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(TOOLS))
    measured = importlib.import_module("batch_invariance")
    monkeypatch.setattr(measured, "MATRICES", {"o": (48, 128)})
    monkeypatch.setattr(measured, "POOL_BYTES", 8 << 20)
    monkeypatch.setattr(measured, "LEAST_S", 0.0)
    words = ["--keys", 600, "--sequences", 2, "--rows", 4, "--rounds", 2, "--threads", 1]
    tool("batch_invariance", tmp_path, *words)
    made = json.loads((tmp_path / "rows.json").read_text())
    (decode,), (product,) = made["decode"], made["products"]
    assert (decode["sequences"], decode["keys"], product["rows"]) == (2, 600, 4)
    assert 0 < decode["best_us"] <= decode["fixed_us"]
    assert 0 < product["best_us"] <= product["fixed_us"]
    assert product["fixed"] == "gemv"
    assert "## products" in (tmp_path / "table.md").read_text()
    # one accumulator has the engine's bits, two have others
    rng = np.random.default_rng(0)
    w = nk.quantize(
        rng.standard_normal((16, 4096), dtype=np.float32), "q4_0", quantizer="reference"
    )
    x, packed = rng.standard_normal((3, 4096), dtype=np.float32), w.packed()
    rows, out = Int8Rows.empty(3, 4096), np.empty((2, 3, 16), np.float32)
    quantize_activations(x, rows)
    for n in (1, 2):
        measured.in_chains(packed.form, 4, n)(
            rows.codes, 3, rows.scales, rows.sums, packed.data, packed.n_blocks,
            np.zeros(0, np.float32), False, out[n - 1], 0, 1,
        )  # fmt: skip
    assert np.array_equal(out[0], nk.qmatmul(x, w, activations="int8"))
    assert not np.array_equal(out[0], out[1])
    assert np.allclose(out[0], out[1], atol=4e-3)  # 128 roundings of 1.5e-5 each, of sums below 256


def test_load(tool, tmp_path, capsys):
    tool("load", tmp_path, "tiny_python", "--rounds", 1, "--threads", 1)
    (row,) = map(json.loads, (tmp_path / "load.jsonl").read_text().splitlines())
    assert (row["model"], row["version"], row["round"]) == ("tiny_python", "now", 0)
    assert row["weight_bytes"] >= row["bytes_read"] == 7_344_640
    assert min(row["load_s"], row["read_s"], row["fault_s"], row["peak_bytes"]) > 0
    assert "tiny_python (now): load_s" in capsys.readouterr().out


@pytest.mark.skipif("avx512vnni" not in isa.features(), reason="counts AVX-512 VNNI instructions")
def test_gemv(tool, tmp_path):
    tool("gemv", tmp_path, "q4_0", "--megabytes", 1, "--repeats", 1)
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert row["packed_bits_per_weight"] == 4.5
    # 8 dot products, 4 loads and 8 extractions of codes at least
    assert 20 <= row["instructions_per_512_weights"] < 100
    assert row["share_of_read"] > 0


def test_trellis_constants(tool, tmp_path):
    """Levels in use waste 0.1 to 0.2 bit, and random matrices more."""
    for words in (("--rounds", 1), ("--matrices", 2)):
        tool("trellis_constants", tmp_path, "--bits", 2, "--weights", 4096, *words)
    levels, matrices = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    # 4096 weights: the error varies by 1 % or 0.02 bit
    assert levels["wasted_bits"] == pytest.approx(0.1, abs=0.05)
    assert levels["wasted_bits_of_new_levels"] < 0.4
    assert (matrices["rank"], matrices["matrices"]) == (0, 2)
    assert matrices["log2_error"] == matrices["best"]
