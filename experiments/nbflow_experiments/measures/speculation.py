"""Speculative decoding against plain decoding.

The first `prompt` tokens of the evaluated windows are continued greedily by `decode` tokens,
`batch` of them at the same time, through an `nbflow.LLMEngine` without prefix cache.  A round runs
a new choice of windows plainly and then with draft tokens: from n-grams of the text (`draft` =
ngram) or from a draft model (`draft` = MODEL or MODEL:FORMAT, its weights in that format),
`n_draft` per step.  Verification keeps the output unchanged, which `speculation_same_share` checks:
the share of requests with the same tokens in both runs.

`speculation_accepted_share` is the acceptance rate of draft tokens (absent without draft tokens);
`speculation_tokens_per_step` the tokens produced per verification, the bonus token included: it is
also the speed-up bound for free drafting and verification at the cost of a decode step.
`speculation_tokens_per_s` and `plain_tokens_per_s` are generated tokens per second of wall time,
prefill included, medians over `repeats` rounds after `warmup` discarded ones.  A round repeats
until each side has taken `min_repetition_s` seconds, and the mean times count.
`speculation_speedup` is the median of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from nbflow_experiments import backend
from nbflow_experiments.measures.engine_requests import (
    Round,
    TimedRequest,
    repeat_rounds,
    serve,
    with_engine,
)
from nbflow_experiments.measures.measure import Context, Measure, MeasureResult, Reading, repeated
from nbflow_experiments.scoring.estimates import estimate_share
from nbflow_kernels.errors import UsageError

if TYPE_CHECKING:
    from nbflow.engine.llm_engine import LLMEngine


def run(context: Context) -> MeasureResult:
    """Time the rounds."""
    assert context.windows is not None
    names = ("batch", "prompt", "decode", "repeats", "warmup", "n_draft")
    batch, prompt, decode, repeats, warmup, n_draft = map(context.number, names)
    if context.windows.shape[1] < prompt:
        raise UsageError(
            f"speculation: the prompts are beginnings of the evaluated windows; eval_window must "
            f"be at least prompt = {prompt}, got {context.windows.shape[1]}"
        )
    windows = context.windows[:, :prompt]

    def work(engine: LLMEngine) -> list[tuple[Round, ...]]:
        with proposer(context) as draft:

            def one_round(r: int) -> tuple[Round, ...]:
                chosen = windows[np.arange(r * batch, (r + 1) * batch) % len(windows)]
                plain = serve(engine, [TimedRequest(ids, decode) for ids in chosen])
                requests = [TimedRequest(ids, decode, draft, n_draft) for ids in chosen]
                return plain, serve(engine, requests)

            return repeat_rounds(repeats, warmup, context.min_repetition_s, one_round)

    rounds = with_engine(context.model, work, prefix_cache=False)
    return MeasureResult() if rounds is None else summary(rounds)


@contextlib.contextmanager
def proposer(context: Context) -> Iterator[Any]:
    """Yield "ngram" or the draft model that the setting `draft` names."""
    text = str(context.config["draft"])
    if text == "ngram":
        yield text
        return
    model, _, weights = text.rpartition(":")
    if not backend.is_weight_format(weights):
        model, weights = text, "f32"
    loaded = backend.load(
        model, weights=weights.lower(), kv="f16", partition="0", max_context=0,
        threads=context.number("threads"), comm=backend.SelfComm(),
    )  # fmt: skip
    try:
        yield loaded
    finally:
        loaded.close()


def summary(rounds: list[tuple[Round, ...]]) -> MeasureResult:
    """Summarise rounds, each of a plain and a speculative run."""
    readings: list[Reading] = []
    for kind, metric in enumerate(("plain_tokens_per_s", "speculation_tokens_per_s")):
        rates = [r[kind].n_tokens / r[kind].seconds for r in rounds]
        readings += repeated(metric, rates, "token/s")
    ratios = [plain.seconds / drafted.seconds for plain, drafted in rounds]
    results = [a for _, drafted in rounds for a in drafted.results]
    n_drafted, n_accepted = (
        sum(getattr(a, k) for a in results) for k in ("n_drafted", "n_accepted")
    )
    n_tokens = sum(len(a.ids) for a in results)
    same = [a.ids == b.ids for r in rounds for a, b in zip(*(x.results for x in r), strict=True)]
    readings += [
        *repeated("speculation_speedup", ratios, "1"),
        Reading("speculation_tokens_per_step", n_tokens / (n_tokens - n_accepted), "1", n_tokens),
        Reading("speculation_same_share", float(np.mean(same)), "1", len(same)),
    ]
    if n_drafted:
        share = estimate_share(np.arange(n_drafted) < n_accepted)
        readings.append(
            Reading("speculation_accepted_share", share.mean, "1", n_drafted, share.stderr)
        )
    return MeasureResult(readings)


MEASURE = Measure("speculation", "point", run, str(__doc__), needs_text=True, by_default=False)
