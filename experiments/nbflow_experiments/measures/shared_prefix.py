"""Prompts with a shared prefix: time to first token with and without the prefix cache.

`batch` requests arrive at the same moment at an `nbflow.LLMEngine`.  Their prompts have `prompt`
random tokens, the first `prefix` of which are the same for all, and they generate `decode` tokens
greedily.  A round runs them three times, with an empty prefix cache before each: *cold*, where
nothing may be shared; *together*, where the first request computes the shared prefix and the others
wait for it; and *warm*, after another request has left the prefix in the cache.  The last token of
a prompt is always computed.

Times are seconds of wall time from the arrival to a request's first token, queueing included,
median over the requests of `repeats` rounds after `warmup` discarded ones: `prefix_cold_ttft_s`,
`prefix_together_ttft_s`, `prefix_ttft_s` (warm). A round repeats until each of the three runs has
taken `min_repetition_s` seconds, and the mean times count. `prefix_ttft_speedup` is the median over
the rounds of the ratio cold to warm of the rounds' medians. `prefix_cached_share` is the share of
the prompts' tokens that came from the cache in warm runs, `prefix_same_share` the share of requests
that generated the same tokens in all three runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbflow_experiments.measures.engine_requests import (
    Round,
    TimedRequest,
    random_prompt,
    repeat_rounds,
    serve,
    with_engine,
)
from nbflow_experiments.measures.measure import Array, Context, Measure, MeasureResult, Reading

if TYPE_CHECKING:
    from nbflow.engine.llm_engine import LLMEngine

Rounds = list[tuple[Round, ...]]
_KINDS = ("prefix_cold_ttft_s", "prefix_together_ttft_s", "prefix_ttft_s")


def run(context: Context) -> MeasureResult:
    """Time the rounds."""
    names = ("batch", "prompt", "prefix", "decode", "repeats", "warmup")
    batch, prompt, prefix, decode, repeats, warmup = map(context.number, names)
    rng = np.random.default_rng(0)
    common = random_prompt(context.model, rng, prefix)
    prompts = [
        np.concatenate([common, random_prompt(context.model, rng, prompt - prefix)])
        for _ in range(batch + 1)
    ]

    def work(engine: LLMEngine) -> Rounds:
        return repeat_rounds(
            repeats,
            warmup,
            context.min_repetition_s,
            lambda _: one_round(engine, prompts, decode),
        )

    rounds = with_engine(context.model, work)
    return MeasureResult() if rounds is None else summary(rounds, prompt)


def one_round(
    engine: LLMEngine, prompts: list[np.ndarray], n_new: int
) -> tuple[Round, Round, Round]:
    """Run the requests cold, together and warm; the last prompt only fills the cache."""
    engine.flush()
    apart = [TimedRequest(ids, n_new, salt=str(i)) for i, ids in enumerate(prompts[:-1])]
    requests = [TimedRequest(ids, n_new) for ids in prompts[:-1]]
    cold = serve(engine, apart)
    engine.flush()
    together = serve(engine, requests)
    engine.flush()
    serve(engine, [TimedRequest(prompts[-1], 1)])
    return cold, together, serve(engine, requests)


def summary(rounds: Rounds, prompt: int) -> MeasureResult:
    """Summarise rounds with prompts of `prompt` tokens."""
    readings, arrays = [], {}
    medians = [[float(np.median([a.first_token_s for a in r.results])) for r in x] for x in rounds]
    for kind, metric in enumerate(_KINDS):
        times = np.array([a.first_token_s for x in rounds for a in x[kind].results])
        readings.append(Reading(metric, float(np.median(times)), "s", times.size))
        readings += [Reading(metric, m[kind], "s", repeat=i) for i, m in enumerate(medians)]
        note = "from the arrival to the first token of one request, round by round"
        arrays[metric] = Array(times, "s", note=note)
    ratios = [cold / warm for cold, _, warm in medians]
    warm_results = [a for _, _, warm in rounds for a in warm.results]
    cached = sum(a.cached_tokens for a in warm_results) / (prompt * len(warm_results))
    same = [len({a.ids for a in three}) == 1 for x in rounds for three in zip(
        *(r.results for r in x), strict=True)]  # fmt: skip
    readings += [
        Reading("prefix_ttft_speedup", float(np.median(ratios)), "1", len(ratios)),
        Reading("prefix_cached_share", cached, "1", len(warm_results)),
        Reading("prefix_same_share", float(np.mean(same)), "1", len(same)),
    ]
    return MeasureResult(readings, arrays)


MEASURE = Measure("shared_prefix", "point", run, str(__doc__), by_default=False)
