"""Kullback-Leibler divergence from the unquantized model, and top-1 agreement.

KL(reference || model) in nats for every scored token of the windows that `perplexity` describes:
mean with its standard error, median, 90th, 95th and 99th percentile and maximum (percentiles
interpolate linearly). The reference is the same model with float32 weights and a float32 key/value
cache on one rank. `top1_agreement_share` is the share of tokens for which both put the highest
probability on the same token, with the binomial standard error.  `nll_difference_mean_nats` is the
mean of the paired differences of the negative log likelihoods (model - reference); its standard
error is that of the pairs, far smaller than the perplexities' own.  A float32 point is not exactly
0 where its cache, partition or summation order differs from the reference's: that is the noise
floor of the comparison.
"""

from __future__ import annotations

import numpy as np

from nbflow_experiments.measures.evaluation import evaluate
from nbflow_experiments.measures.measure import Array, Context, Measure, MeasureResult, Reading
from nbflow_experiments.scoring.estimates import estimate_mean, estimate_share


def run(context: Context) -> MeasureResult:
    """Evaluate the text and compare next-token distributions."""
    done = evaluate(context)
    if not context.leads:
        return MeasureResult()
    mean = estimate_mean(done.divergence)
    shift = estimate_mean(done.nll - done.reference_nll)
    agreement = estimate_share(done.same_top)
    readings = [Reading("kld_mean_nats", mean.mean, "nat", mean.n, mean.stderr)]
    for name, q in (("median", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("max", 100)):
        value = float(np.percentile(done.divergence, q))
        readings.append(Reading(f"kld_{name}_nats", value, "nat", mean.n))
    readings += [
        Reading("top1_agreement_share", agreement.mean, "1", agreement.n, agreement.stderr),
        Reading("nll_difference_mean_nats", shift.mean, "nat", shift.n, shift.stderr),
    ]
    note = "KL(reference || model) of one scored token, in the order of the text"
    return MeasureResult(readings, {"kld_nats": Array(done.divergence, "nat", note=note)})


MEASURE = Measure("divergence", "quality", run, str(__doc__), needs_text=True, needs_reference=True)
