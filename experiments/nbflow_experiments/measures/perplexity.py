"""Perplexity of held-out text with its standard error.

The text is cut into windows of `eval_window` tokens that do not overlap; each is evaluated from an
empty cache, its first token replaced by BOS where the tokenizer adds one.  The first `eval_context`
tokens of a window are not scored (default 1: every token that can be predicted is), all others
are.  llama-perplexity scores the second half of its windows: eval_context = eval_window / 2 + 1
does the same.  The perplexity is exp(mean negative log likelihood); its standard error goes through
the exponential to first order and takes the tokens as independent, which understates it where
neighbouring tokens are alike.  Log likelihoods are summed in float64 from the engine's float32
logits; one pass, deterministic.
"""

from __future__ import annotations

import numpy as np

from nbflow_experiments.measures.evaluation import evaluate
from nbflow_experiments.measures.measure import Array, Context, Measure, MeasureResult, Reading
from nbflow_experiments.scoring.estimates import estimate_mean, estimate_perplexity


def run(context: Context) -> MeasureResult:
    """Evaluate the text and average."""
    nll = evaluate(context).nll
    if not context.leads:
        return MeasureResult()
    perplexity, nats = estimate_perplexity(nll), estimate_mean(nll)
    lost = float(np.mean(~np.isfinite(nll)))
    return MeasureResult(
        [
            Reading("perplexity", perplexity.mean, "1", perplexity.n, perplexity.stderr),
            Reading("nll_mean_nats", nats.mean, "nat", nats.n, nats.stderr),
            Reading("nonfinite_share", lost, "1", nll.size),
        ],
        {
            "nll_nats": Array(
                nll, "nat", note="-log p of one scored token, in the order of the text"
            )
        },
    )


MEASURE = Measure("perplexity", "quality", run, str(__doc__), needs_text=True)
