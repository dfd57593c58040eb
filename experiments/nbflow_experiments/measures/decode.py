"""Decode throughput.

Wall time of `decode` steps of the whole batch after prompts of `prompt` tokens, greedy,
communication included.  Prefill, loading, quantization, compilation and tokenization are excluded;
`warmup` runs are discarded.  A repetition is as many runs as take `min_repetition_s` seconds, and
their mean counts.  Tokens per second counts all sequences (batch x decode / time).  Every one of
`repeats` repetitions is stored; the median is quoted, with the slowest and the fastest.
"""

from __future__ import annotations

from nbflow_experiments import backend
from nbflow_experiments.measures.measure import Context, Measure, MeasureResult, speed


def run(context: Context) -> MeasureResult:
    """Time the steps."""
    steps, batch = context.number("decode"), context.number("batch")
    seconds = backend.time_decode(
        context.model,
        context.number("prompt"),
        steps,
        batch,
        context.number("repeats"),
        context.number("warmup"),
        context.min_repetition_s,
    )
    return speed("decode", seconds, steps * batch, context.leads)


MEASURE = Measure("decode", "point", run, str(__doc__))
