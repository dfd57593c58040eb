"""Communication volume between ranks, in bytes.

The payload bytes of one untimed repetition of the `decode` measure: `batch` prompts of `prompt`
tokens are prefilled and `decode` steps follow.  A message to k ranks counts k times; headers and
control messages do not count.  `traffic_predicted_bytes` is the partition's prediction for the same
run. `traffic_bytes_per_token` divides the measured bytes by all tokens,
batch x (prompt + decode).  With ``all_reduce = "q8"``, `all_reduce_error_relative` is the root mean
square of the rounding error of the partial sums over that of the sums, for all steps since the
model was loaded.
"""

from __future__ import annotations

from nbflow_experiments import backend
from nbflow_experiments.measures.measure import Context, Measure, MeasureResult, Reading


def run(context: Context) -> MeasureResult:
    """Count the bytes sent in one run."""
    prompt, steps, batch = (context.number(name) for name in ("prompt", "decode", "batch"))
    context.model.reset_traffic()
    backend.run_batch(context.model, prompt, steps, batch)
    ranks = context.model.gather("traffic")
    rounded = context.config["all_reduce"] != "f32"
    error = context.model.all_reduce_error() if rounded else 0.0
    if not context.leads:
        return MeasureResult()
    measured = sum(rank["measured_bytes"] for rank in ranks)
    predicted = sum(rank["predicted_bytes"] for rank in ranks)
    per_token = measured / (batch * (prompt + steps))
    readings = [
        Reading("traffic_measured_bytes", float(measured), "byte"),
        Reading("traffic_predicted_bytes", float(predicted), "byte"),
        Reading("traffic_bytes_per_token", per_token, "byte/token"),
    ]
    if rounded:
        readings.append(Reading("all_reduce_error_relative", error, "1"))
    return MeasureResult(readings)


MEASURE = Measure("traffic", "point", run, str(__doc__))
