"""Continuous batching of requests of different lengths, against running them sequentially.

`batch` requests arrive at the same moment at an `nbflow.LLMEngine` without prefix cache.  Their
prompts have 1/2, 3/2, 3/4 and 5/4 of `prompt` random tokens in turn, and they generate 3/2, 1/2,
5/4 and 3/4 of `decode` tokens greedily, so that they join and leave the batch at different times.
A round runs them together (continuous batching), then sequentially through the same engine.

`batching_tokens_per_s` and `sequential_tokens_per_s` are generated tokens of all requests per
second of wall time from the arrival to the end of the last, prefill included; medians over
`repeats` rounds after `warmup` discarded ones.  A round repeats until each side has taken
`min_repetition_s` seconds, and the mean times count.  `batching_speedup` is the median of the
rounds' ratios.  `batching_ttft_s` and `sequential_ttft_s` are the time from the arrival to a
request's first token, queueing included: median over the requests of all rounds.
"""

from __future__ import annotations

import numpy as np

from nbflow_experiments.measures.engine_requests import (
    Round,
    TimedRequest,
    random_prompt,
    repeat_rounds,
    serve,
    with_engine,
)
from nbflow_experiments.measures.measure import (
    Array,
    Context,
    Measure,
    MeasureResult,
    Reading,
    repeated,
)
from nbflow_kernels.errors import UsageError

PROMPTS = (2, 6, 3, 5)
"""Prompt lengths in quarters of `prompt`, in turn."""
DECODES = (6, 2, 5, 3)
"""Generated lengths in quarters of `decode`, in turn."""


def lengths(i: int, prompt: int, decode: int) -> tuple[int, int]:
    """Return prompt length and generated length of the i-th request."""
    return max(1, prompt * PROMPTS[i % 4] // 4), max(1, decode * DECODES[i % 4] // 4)


def run(context: Context) -> MeasureResult:
    """Time the rounds."""
    batch, prompt, decode = (context.number(name) for name in ("batch", "prompt", "decode"))
    sizes = [lengths(i, prompt, decode) for i in range(batch)]
    longest, limit = max(map(sum, sizes)), context.model.spec.max_context
    if longest > limit:
        raise UsageError(
            f"batching: the longest of requests with prompt = {prompt} and decode = {decode} has "
            f"{longest} tokens, the context holds {limit}; lower them"
        )
    rng = np.random.default_rng(0)
    requests = [TimedRequest(random_prompt(context.model, rng, n), n_new) for n, n_new in sizes]
    n_rounds, warmup = context.number("repeats"), context.number("warmup")
    rounds = with_engine(
        context.model,
        lambda engine: repeat_rounds(
            n_rounds,
            warmup,
            context.min_repetition_s,
            lambda _: (serve(engine, requests), serve(engine, requests, at_once=False)),
        ),
        prefix_cache=False,
    )
    return MeasureResult() if rounds is None else summary(rounds)


def summary(rounds: list[tuple[Round, ...]]) -> MeasureResult:
    """Summarise rounds, each of a batched and a sequential run."""
    readings, arrays = [], {}
    for name, kind in (("batching", 0), ("sequential", 1)):
        rates = [r[kind].n_tokens / r[kind].seconds for r in rounds]
        first = np.array([a.first_token_s for r in rounds for a in r[kind].results])
        metric = f"{name}_tokens_per_s"
        readings += repeated(metric, rates, "token/s")
        readings.append(Reading(f"{name}_ttft_s", float(np.median(first)), "s", first.size))
        note = "from the arrival to the first token of one request, round by round"
        arrays[f"{name}_ttft_s"] = Array(first, "s", note=note)
    ratios = [one.seconds / together.seconds for together, one in rounds]
    readings += repeated("batching_speedup", ratios, "1")
    return MeasureResult(readings, arrays)


MEASURE = Measure("batching", "point", run, str(__doc__), by_default=False)
