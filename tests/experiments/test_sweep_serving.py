"""The measures of serving, with the real engine at tiny size, and their arithmetic by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nbflow_experiments.measures import batching, cascade, shared_prefix, speculation
from nbflow_experiments.measures.engine_requests import RequestResult, Round, repeat_rounds
from nbflow_experiments.measures.measure import MeasureResult
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep

BASE = {
    "model": ["tiny_python"],
    "weights": ["f16"],
    "prompt": ["72"],
    "decode": ["8"],
    "repeats": ["2"],
    "min_repetition_s": ["0"],
    "warmup": ["0"],
    "threads": ["1"],
}


def measure(tmp_path: Path, measures: str, fails: int = 0, **lists: str) -> pd.DataFrame:
    asked = BASE | {name: [text] for name, text in lists.items()}
    names = ('sweep.name="s"', f'sweep.measures=["{measures}"]')
    assert run_sweep(SweepOptions(None, tmp_path, names, asked)) == fails
    return pd.read_csv(tmp_path / "s" / "points.csv", dtype={"partition": str})


def numbers(result: MeasureResult) -> dict[str, float]:
    return {r.metric: r.value for r in result.readings if r.repeat is None}


def request_result(
    n: int, first: float = 0.0, cached: int = 0, drafted: int = 0, right: int = 0
) -> RequestResult:
    return RequestResult(tuple(range(n)), first, cached, drafted, right)


def test_batching(tmp_path: Path) -> None:
    table = measure(tmp_path, "batching", batch="1,5")
    assert (table.batching_speedup > 0).all()
    assert (table.batching_ttft_s > 0).all()
    assert (table.sequential_ttft_s[table.batch == 5] > 0).all()
    assert [batching.lengths(i, 8, 4) for i in range(5)] == [
        (4, 6),
        (12, 2),
        (6, 5),
        (10, 3),
        (4, 6),
    ]


def test_a_round_repeats_until_each_side_took_its_time() -> None:
    seconds = iter([(9.0, 9.0), (1.0, 0.2), (3.0, 0.4), (2.0, 2.0)])
    firsts = iter([9.0, 0.1, 0.3, 0.5])
    calls = []

    def run(i: int) -> tuple[Round, ...]:
        calls.append(i)
        result = request_result(len(calls), next(firsts))
        return tuple(Round(s, (result,)) for s in next(seconds))

    rounds = repeat_rounds(2, 1, 0.5, run)
    assert calls == [0, 1, 1, 2]
    assert [r.seconds for r in rounds[0]] == pytest.approx([2.0, 0.3])
    assert rounds[0][0].results[0].first_token_s == pytest.approx(0.2)
    assert len(rounds[0][0].results[0].ids) == 2  # tokens of the first run after the warm-up
    assert [r.seconds for r in rounds[1]] == [2.0, 2.0]


def test_batching_by_hand() -> None:
    together = Round(2.0, (request_result(6, 0.5), request_result(4, 1.0)))
    apart = Round(5.0, (request_result(6, 0.5), request_result(4, 4.0)))
    found = numbers(batching.summary([(together, apart)] * 3))
    assert found == {
        "batching_tokens_per_s": 5.0,
        "batching_ttft_s": 0.75,
        "sequential_tokens_per_s": 2.0,
        "sequential_ttft_s": 2.25,
        "batching_speedup": 2.5,
    }


def test_batching_that_does_not_fit_is_a_row(tmp_path: Path) -> None:
    asked = BASE | {"prompt": ["400"], "batch": ["2"]}  # the second prompt has 600 tokens
    names = ('sweep.name="s"', 'sweep.measures=["batching"]')
    assert run_sweep(SweepOptions(None, tmp_path, names, asked)) == 1
    message = pd.read_csv(tmp_path / "s" / "points.csv").error_message[0]
    assert "has 604 tokens, the context holds 512; lower them" in message


def test_a_shared_prefix_is_read_once(tmp_path: Path) -> None:
    table = measure(tmp_path, "shared_prefix", prefix="0,64,70", batch="2").set_index("prefix")
    assert dict(table.prefix_cached_share) == {0: 0.0, 64: 64 / 72, 70: 70 / 72}
    assert set(table.prefix_same_share) == {1.0}
    assert (table.prefix_ttft_s > 0).all()


def test_shared_prefix_by_hand() -> None:
    cold = Round(9.0, (request_result(2, 3.0), request_result(2, 5.0)))
    together = Round(9.0, (request_result(2, 2.0), request_result(2, 4.0)))
    warm = Round(9.0, (request_result(2, 1.0, cached=6), request_result(3, 1.0, cached=2)))
    found = numbers(shared_prefix.summary([(cold, together, warm)], prompt=8))
    assert found == {
        "prefix_cold_ttft_s": 4.0,
        "prefix_together_ttft_s": 3.0,
        "prefix_ttft_s": 1.0,
        "prefix_ttft_speedup": 4.0,
        "prefix_cached_share": 0.5,
        "prefix_same_share": 0.5,  # the second request went on differently
    }


def test_cascade(tmp_path: Path) -> None:
    table = measure(
        tmp_path,
        "cascade",
        shared_keys="64,70,0",
        own_keys="20",
        batch="3",
        kv="q8_0/q4_0",
        fails=1,
    ).set_index("shared_keys")
    assert "shared_keys must be a multiple of 16, the tokens of a page, got 70" in str(
        table.error_message[70]
    )
    done = table[table.status == "done"]
    assert set(done.cascade_same_share) == {1.0}
    assert (done.filter(regex="cascade_.*_s$") > 0).all(axis=None)
    assert dict(done.cascade_byte_ratio) == {64: 3 * 84 / (64 + 60), 0: 1.0}
    # 4 key/value heads of 32 numbers: 34 bytes of q8_0, 18 of q4_0
    assert dict(done.cascade_bytes) == {64: 124 * 4 * 52, 0: 60 * 4 * 52}


def test_cascade_by_hand() -> None:
    sizes = cascade.Sizes(4, 32, 16, (4, 2, 8), "f32/f16")
    seconds = np.array([[4.0, 2.0, 8.0], [6.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
    assert numbers(cascade.summary(sizes, seconds, 0.75)) == {
        "cascade_flat_s": 4.0,
        "cascade_shared_s": 2.0,
        "cascade_levels_s": 3.0,
        "cascade_shared_speedup": 3.0,
        "cascade_levels_speedup": 1.5,
        "cascade_flat_bytes": 4 * 48 * 2 * 8 * 6,
        "cascade_bytes": (32 + 64) * 2 * 8 * 6,
        "cascade_byte_ratio": 2.0,
        "cascade_same_share": 0.75,
    }


def test_speculation(tmp_path: Path) -> None:
    table = measure(
        tmp_path, "speculation", draft="ngram,tiny_python:f16", n_draft="2,4", batch="2"
    ).set_index(["draft", "n_draft"])
    assert set(table.speculation_same_share) == {1.0}
    assert (table.speculation_tokens_per_step >= 1).all()
    # the model is its own draft model
    own = table.loc["tiny_python:f16"]
    assert set(own.speculation_accepted_share) == {1.0}
    # 8 tokens: one from the prompt, then 2 + 1, 2 + 1 and 1 (or 4 + 1 and 2) a step
    assert dict(own.speculation_tokens_per_step) == pytest.approx({2: 8 / 4, 4: 8 / 3})


def test_speculation_by_hand() -> None:
    plain = Round(3.0, (request_result(6), request_result(6)))
    drafted = Round(
        2.0, (request_result(6, drafted=8, right=4), request_result(6, drafted=2, right=0))
    )
    found = numbers(speculation.summary([(plain, drafted)]))
    assert found == {
        "plain_tokens_per_s": 4.0,
        "speculation_tokens_per_s": 6.0,
        "speculation_speedup": 1.5,
        "speculation_tokens_per_step": 12 / 8,
        "speculation_same_share": 1.0,
        "speculation_accepted_share": 0.4,
    }
    silent = numbers(speculation.summary([(plain, plain)]))
    assert "speculation_accepted_share" not in silent  # 0 of 0
    assert silent["speculation_tokens_per_step"] == 1.0
    assert np.isfinite(list(silent.values())).all()
