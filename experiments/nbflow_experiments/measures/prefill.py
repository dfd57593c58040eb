"""Prefill throughput.

Wall time of one forward pass over `batch` prompts of `prompt` tokens each, from an empty cache to
the first greedy token of each, scheduling and communication included.  Loading, quantization,
compilation and tokenization are excluded; `warmup` passes are run and discarded.  A repetition is
as many passes as take `min_repetition_s` seconds, and their mean counts.  Tokens per second counts
all sequences (batch x prompt / time).  Every one of `repeats` repetitions is stored; the median is
quoted, with the slowest and the fastest.
"""

from __future__ import annotations

from nbflow_experiments import backend
from nbflow_experiments.measures.measure import Context, Measure, MeasureResult, speed


def run(context: Context) -> MeasureResult:
    """Time the prompts."""
    prompt, batch = context.number("prompt"), context.number("batch")
    seconds = backend.time_prefill(
        context.model,
        prompt,
        batch,
        context.number("repeats"),
        context.number("warmup"),
        context.min_repetition_s,
    )
    return speed("prefill", seconds, prompt * batch, context.leads)


MEASURE = Measure("prefill", "point", run, str(__doc__))
