"""Statistics of scored tokens, under llama-perplexity's names.

Errors are standard errors; tokens count as independent, which understates them where neighbouring
tokens are alike.  Ratios and differences of perplexities go through the exponential to first order
(delta method), with the covariance of the pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nbflow_experiments.scoring.estimates import estimate_mean, estimate_perplexity, estimate_share
from nbflow_experiments.scoring.token_scores import Scores

KLD_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0)
DELTA_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1)


@dataclass(frozen=True)
class Statistic:
    """One number of the table."""

    group: str
    name: str
    """Label of llama-perplexity."""
    key: str
    value: float
    error: float | None = None
    """Standard error, where one is defined."""
    unit: str = ""
    """"%" for shares, else nothing."""


def statistics(scores: Scores) -> list[Statistic]:
    """Return the statistics of the perplexity, and of the comparison if there is a reference."""
    alone = estimate_perplexity(scores.nll)
    lost = float(np.mean(~np.isfinite(scores.nll))) if scores.nll.size else math.nan
    group = "Perplexity"
    if not scores.divergence.size:
        return [
            Statistic(group, "PPL", "ppl", alone.mean, alone.stderr),
            Statistic(group, "Not finite", "nonfinite_share", 100 * lost, None, "%"),
        ]
    return [
        *_perplexities(scores),
        Statistic(group, "Not finite", "nonfinite_share", 100 * lost, None, "%"),
        *_divergence(scores.divergence),
        *_probabilities(scores),
    ]


def _perplexities(scores: Scores) -> list[Statistic]:
    group = "Perplexity"
    ours, base = estimate_perplexity(scores.nll), estimate_perplexity(scores.reference_nll)
    shift = estimate_mean(scores.nll - scores.reference_nll)
    ratio = math.exp(min(shift.mean, 700.0))
    correlation, covariance = _pair(scores.nll, scores.reference_nll)
    variance = (
        ours.stderr**2 + base.stderr**2 - 2 * ours.mean * base.mean * covariance / len(scores.nll)
    )
    difference = math.sqrt(max(variance, 0.0)) if math.isfinite(variance) else math.nan
    return [
        Statistic(group, "Mean PPL(Q)", "ppl", ours.mean, ours.stderr),
        Statistic(group, "Mean PPL(base)", "ppl_base", base.mean, base.stderr),
        Statistic(
            group, "Cor(ln(PPL(Q)), ln(PPL(base)))", "ppl_correlation", 100 * correlation, None, "%"
        ),
        Statistic(group, "Mean ln(PPL(Q)/PPL(base))", "ln_ppl_ratio", shift.mean, shift.stderr),
        Statistic(group, "Mean PPL(Q)/PPL(base)", "ppl_ratio", ratio, ratio * shift.stderr),
        Statistic(
            group, "Mean PPL(Q)-PPL(base)", "ppl_difference", ours.mean - base.mean, difference
        ),
    ]


def _pair(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    if len(x) < 2:
        return math.nan, math.nan
    with np.errstate(invalid="ignore", divide="ignore"):
        matrix = np.cov(x, y)
        return float(matrix[0, 1] / np.sqrt(matrix[0, 0] * matrix[1, 1])), float(matrix[0, 1])


def _divergence(kld: np.ndarray) -> list[Statistic]:
    group = "KL divergence"
    mean = estimate_mean(kld)
    return [
        Statistic(group, "Mean KLD", "kld_mean", mean.mean, mean.stderr),
        Statistic(group, "Maximum KLD", "kld_max", float(np.max(kld))),
        *(
            Statistic(group, f"{_percent(q)} KLD", _key("kld", q), float(np.percentile(kld, q)))
            for q in KLD_PERCENTILES
        ),
        Statistic(group, "Minimum KLD", "kld_min", float(np.min(kld))),
    ]


def _probabilities(scores: Scores) -> list[Statistic]:
    group = "Token probability"
    delta = 100 * (np.exp(-scores.nll) - np.exp(-scores.reference_nll))
    mean, square = estimate_mean(delta), estimate_mean(delta**2)
    rms = math.sqrt(square.mean) if square.mean >= 0 else math.nan
    same = estimate_share(scores.same_top)
    return [
        Statistic(group, "Mean Δp", "delta_p_mean", mean.mean, mean.stderr, "%"),
        Statistic(group, "Maximum Δp", "delta_p_max", float(np.max(delta)), None, "%"),
        *(
            Statistic(
                group,
                f"{_percent(q)} Δp",
                _key("delta_p", q),
                float(np.percentile(delta, q)),
                None,
                "%",
            )
            for q in DELTA_PERCENTILES
        ),
        Statistic(group, "Minimum Δp", "delta_p_min", float(np.min(delta)), None, "%"),
        Statistic(
            group, "RMS Δp", "delta_p_rms", rms, square.stderr / (2 * rms) if rms else 0.0, "%"
        ),
        Statistic(group, "Same top p", "same_top_p", 100 * same.mean, 100 * same.stderr, "%"),
    ]


def _percent(q: float) -> str:
    return "Median" if q == 50 else f"{q:.1f}%"


def _key(name: str, q: float) -> str:
    return f"{name}_median" if q == 50 else f"{name}_p{q:g}".replace(".", "_")


def table(found: list[Statistic]) -> str:
    """Return the statistics as text, grouped."""
    width = max(len(s.name) for s in found)
    lines: list[str] = []
    for s in found:
        heading = f"== {s.group}"
        if heading not in lines:
            lines += ["", heading] if lines else [heading]
        error = "" if s.error is None else f" ± {s.error:9.6f}"
        unit = f" {s.unit}" if s.unit else ""
        lines.append(f"{s.name:<{width}} : {s.value:11.6f}{error}{unit}")
    return "\n".join(lines)


def as_json(found: list[Statistic]) -> dict[str, float | None]:
    """Return the statistics by key; errors under ``KEY_stderr``."""
    result: dict[str, float | None] = {}
    for s in found:
        result[s.key] = s.value
        if s.error is not None:
            result[f"{s.key}_stderr"] = s.error
    return result
