"""Draws on a device: the CPU's tokens, and nothing of the size of the logits comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbflow
from nbflow.engine.request import Request
from nbflow.engine.sampler import SamplerOutput, gather_logprobs, sample_ahead, sample_tokens
from nbflow.sampling import Strategy, make_strategy
from nbflow.sampling.logits_processors import LogitsProcessors, constrain

pytestmark = pytest.mark.compiler
V = 1500
FOLDER = Path(__file__).parents[1] / "golden" / "families" / "llama31"
BIAS = LogitsProcessors(
    logit_bias=((7, 3.0), (11, -2.0)), frequency_penalty=0.5, repetition_penalty=1.2
)
# strategy, and most bytes for a row that may come back: a token, or the tokens that decide
STRATEGIES: dict[str, tuple[Strategy, int]] = {
    "greedy": (make_strategy("greedy"), 4),
    "sample": (make_strategy("sample", temperature=0.7), 4),
    "filters": (make_strategy("filters", top_k=50, top_p=0.9, min_p=0.02, temperature=1.5), 4),
    "chain": (make_strategy("chain", repeat_penalty=1.3, xtc_probability=0.5), 8 * (40 + 7)),
    "pool": (make_strategy("inferflow.tfs"), 8 * 50),
    "constrained": (constrain(make_strategy("top_p"), BIAS), 4),
    "constrained chain": (constrain(make_strategy("chain"), BIAS), 8 * 40),
    "mirostat": (make_strategy("mirostat"), 4 * V),  # needs the row
}


class Traffic:
    """The sizes of what comes from the device."""

    def __init__(self) -> None:
        self.sizes: list[int] = []


@pytest.fixture
def traffic(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    seen, get = Traffic(), cupy.ndarray.get

    def counted(self: Any, *args: Any, **options: Any) -> np.ndarray:
        host: np.ndarray = get(self, *args, **options)
        seen.sizes.append(host.nbytes)
        return host

    monkeypatch.setattr(cupy.ndarray, "get", counted)
    return seen


def logits(n_rows: int) -> np.ndarray:
    found = 2 * np.random.default_rng(3).standard_normal((n_rows, V)).astype(np.float32)
    found[:, 100:110] = found[:, :1]  # equals: the lowest id comes first
    return found


def requests(*strategies: Strategy, logprobs: bool = False, n_top: int = 0) -> list[Request]:
    options = {"wants_logprobs": logprobs, "n_top_logprobs": n_top}
    return [
        Request([3, 9, 9, 4, i, 20], 8, strategy, 5 + i, **options)
        for i, strategy in enumerate(strategies)
    ]


@pytest.mark.parametrize("name", STRATEGIES)
def test_tokens_are_the_cpus_and_no_logits_come_back(
    name: str, cupy: Any, traffic: Traffic
) -> None:
    strategy, most = STRATEGIES[name]
    rows, there = logits(3), cupy.asarray(logits(3))
    here_requests, there_requests = requests(*3 * [strategy]), requests(*3 * [strategy])
    for _ in range(2):
        wanted = sample_tokens(rows, here_requests).tolist()
        assert sample_tokens(there, there_requests).tolist() == wanted
        for request, token in zip(here_requests + there_requests, 2 * wanted, strict=True):
            request.ids.append(token)
    assert 0 < sum(traffic.sizes) <= 2 * 3 * most
    np.testing.assert_array_equal(there.get(), rows)  # not changed


def test_different_strategies_share_a_step(cupy: Any, traffic: Traffic) -> None:
    strategies = [strategy for strategy, _ in STRATEGIES.values()]
    rows = logits(len(strategies))
    wanted = sample_tokens(rows, requests(*strategies)).tolist()
    assert sample_tokens(cupy.asarray(rows), requests(*strategies)).tolist() == wanted
    assert sum(traffic.sizes) <= sum(most for _, most in STRATEGIES.values()) + 8 * 50


def test_log_probabilities_and_the_most_probable_tokens(cupy: Any, traffic: Traffic) -> None:
    rows, both = logits(2), [STRATEGIES[n][0] for n in ("greedy", "filters")]
    wanted, found = (
        sample(x, requests(*both, logprobs=True, n_top=4)) for x in (rows, cupy.asarray(rows))
    )
    assert_same(found, wanted)
    assert sum(traffic.sizes) <= 2 * (4 + 8 + 4 * 12)


def sample(rows: Any, drawn_for: list[Request]) -> SamplerOutput:
    drawn = SamplerOutput.empty(drawn_for)
    drawn.array[:, 0] = sample_tokens(rows, drawn_for)
    gather_logprobs(rows, drawn_for, drawn.array)
    return drawn


def assert_same(found: SamplerOutput, wanted: SamplerOutput) -> None:
    # exponentials are float32 on both sides, an ulp off: so is their sum, 2 * 2**-23 = 2.4e-7
    np.testing.assert_allclose(found.array, wanted.array, rtol=0, atol=2.4e-7)


def test_tokens_that_are_checked_are_drawn_in_one_launch(cupy: Any, traffic: Traffic) -> None:
    (one,) = requests(STRATEGIES["filters"][0])
    wanted = list(sample_ahead(logits(3), one))
    assert list(sample_ahead(cupy.asarray(logits(3)), one)) == wanted
    assert traffic.sizes == [3 * 4]


def test_a_row_with_nan_names_the_logits(cupy: Any) -> None:
    rows = logits(2)
    rows[1, 5] = np.nan
    for name in ("greedy", "filters", "chain"):
        with pytest.raises(nbflow.UsageError, match="NaN"):
            sample_tokens(cupy.asarray(rows), requests(*2 * [STRATEGIES[name][0]]))


def test_generation_sends_tokens_only(cupy: Any, traffic: Traffic) -> None:
    prompts = [[3, 9, 4], [7, 1, 8, 2]]
    options = {"decoding": "top_p", "seed": 3, "temperature": 1.5, "ignore_eos": True}
    with nbflow.load(FOLDER, kv="f32") as model:
        expected = [r.ids for r in model.generate_batch(prompts, 3, **options)]
        n_vocab = model.spec.vocab_size
    with nbflow.load(FOLDER, kv="f32", device="emulator") as model:
        traffic.sizes.clear()
        found = model.generate_batch(prompts, 3, **options)
        assert [r.ids for r in found] == expected
        # a token and, as asked for, its log-probability for each request; never a row
        assert max(traffic.sizes) <= 2 * 8 < 4 * n_vocab
