"""llama.cpp's samplers, functions that modify candidates.

They follow llama.cpp's rules with sums in float64; equal logits keep the order of their ids.
``min_keep`` is the least number of candidates that a truncation leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow.sampling.candidates import MIN_TEMPERATURE, Candidates
from nbflow_kernels.penalties import apply_dry_penalty, apply_penalties

DEFAULT_ORDER = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip
"""llama.cpp's order."""


@dataclass(frozen=True)
class SamplerOptions:
    """Parameters of the samplers; names and defaults are llama.cpp's."""

    samplers: tuple[str, ...] = DEFAULT_ORDER
    """Samplers in order; also ``"top_k;top_p"`` and letters such as ``"kpt"``."""
    temperature: float = 0.8
    """Divisor of the logits; 0 or less is greedy."""
    dynatemp_range: float = 0.0
    """Half range of the entropy-dependent temperature; 0 disables."""
    dynatemp_exponent: float = 1.0
    """Exponent of the normalized entropy in the dynamic temperature."""
    top_k: int = 40
    """Number of tokens kept; 0 for all."""
    top_p: float = 0.95
    """Mass kept; 1 for all."""
    min_p: float = 0.05
    """Smallest probability kept, relative to the best; 0 for all."""
    typical_p: float = 1.0
    """Mass of locally typical tokens kept; 1 for all."""
    tfs_z: float = 1.0
    """Tail-free share of the curvature (if "tfs_z" is in `samplers`); 1 for all."""
    top_n_sigma: float = -1.0
    """Width below the best logit, in standard deviations; 0 or less for all."""
    xtc_probability: float = 0.0
    """Probability of excluding top choices."""
    xtc_threshold: float = 0.1
    """Probability of a top choice; above 0.5 disables."""
    repeat_last_n: int = 64
    """Window of the penalties in tokens, including the prompt; 0 none, -1 all."""
    repeat_penalty: float = 1.0
    """Penalty factor for tokens in the window; 1 disables."""
    frequency_penalty: float = 0.0
    """Penalty per occurrence."""
    presence_penalty: float = 0.0
    """Penalty for any occurrence."""
    dry_multiplier: float = 0.0
    """Penalty of a repetition of the allowed length; 0 disables."""
    dry_base: float = 1.75
    """Growth of the penalty with each further token."""
    dry_allowed_length: int = 2
    """Shorter repetitions are not penalized."""
    dry_penalty_last_n: int = -1
    """Window of DRY in tokens; 0 none, -1 all."""
    dry_breakers: tuple[tuple[int, ...], ...] = ()
    """Token sequences that end a repetition; see `breaker_sequences`."""
    min_keep: int = 0
    """Least number of candidates after a truncation."""


@dataclass(frozen=True)
class SamplerContext:
    """History and random numbers for a sampler."""

    history: np.ndarray
    """int32 (N,): prompt and tokens so far."""
    random: Callable[[], float]
    """Returns a random number in [0, 1)."""


def penalties(candidates: Candidates, chain: SamplerOptions, context: SamplerContext) -> None:
    """Penalize tokens among the last `repeat_last_n`."""
    _penalize(
        candidates,
        context,
        apply_penalties,
        repetition_penalty=chain.repeat_penalty,
        frequency_penalty=chain.frequency_penalty,
        presence_penalty=chain.presence_penalty,
        window=chain.repeat_last_n,
    )


def dry(candidates: Candidates, chain: SamplerOptions, context: SamplerContext) -> None:
    """Penalize tokens that extend a repetition; see `nbflow_kernels.apply_dry_penalty`."""
    _penalize(
        candidates,
        context,
        apply_dry_penalty,
        multiplier=chain.dry_multiplier,
        base=chain.dry_base,
        allowed_length=chain.dry_allowed_length,
        window=chain.dry_penalty_last_n,
        breakers=chain.dry_breakers,
    )


def top_n_sigma(candidates: Candidates, chain: SamplerOptions, context: SamplerContext) -> None:
    """Keep logits within `top_n_sigma` standard deviations of the best (arXiv:2411.07641)."""
    if len(candidates) > 1:
        bound = candidates.logits.max() - chain.top_n_sigma * candidates.logits.std()
        candidates.keep(candidates.logits >= bound)


def top_k(candidates: Candidates, chain: SamplerOptions, context: SamplerContext) -> None:
    """Keep the `top_k` best; 0 or less keeps all."""
    candidates.first(chain.top_k)


def typical(candidates: Candidates, chain: SamplerOptions, context: SamplerContext) -> None:
    """Keep the locally typical tokens with mass `typical_p` (arXiv:2202.00666)."""
    p = candidates.probs()
    order = least_typical_last(p)
    passed = np.flatnonzero(np.cumsum(p[order]) > chain.typical_p)
    n = max(int(passed[0]) + 1 if len(passed) else len(p), chain.min_keep)
    mask = np.zeros(len(p), bool)
    mask[order[:n]] = True
    candidates.keep(mask)


def tail_free(candidates: Candidates, chain: SamplerOptions, context: SamplerContext) -> None:
    """Keep the tokens before the flat tail, as llama.cpp did until 2024."""
    if len(candidates) <= 2:
        return
    candidates.sort()
    candidates.first(max(tail_free_count(candidates.probs(), chain.tfs_z), chain.min_keep))


def top_p(candidates: Candidates, chain: SamplerOptions, context: SamplerContext) -> None:
    """Keep the fewest best tokens with mass `top_p`."""
    candidates.reaching(chain.top_p, max(chain.min_keep, 1))


def min_p(candidates: Candidates, chain: SamplerOptions, context: SamplerContext) -> None:
    """Keep the tokens at least `min_p` times as probable as the best."""
    mask = candidates.logits >= candidates.logits.max() + math.log(chain.min_p)
    if mask.sum() >= chain.min_keep:
        candidates.keep(mask)
    else:
        candidates.first(max(int(mask.sum()), chain.min_keep))


def xtc(candidates: Candidates, chain: SamplerOptions, context: SamplerContext) -> None:
    """Exclude top choices: randomly drop all likely tokens but the least likely one."""
    if len(candidates) < 2:
        return
    if context.random() >= chain.xtc_probability:
        return
    candidates.sort()
    n_likely = int((candidates.probs() >= chain.xtc_threshold).sum())
    if n_likely > 1 and len(candidates) - (n_likely - 1) >= chain.min_keep:
        candidates.take(slice(n_likely - 1, None))


def temperature(candidates: Candidates, chain: SamplerOptions, context: SamplerContext) -> None:
    """Divide logits by the temperature, dynamic with `dynatemp_range`."""
    value = chain.temperature
    if chain.dynatemp_range > 0.0:
        if len(candidates) < 2:
            return
        low, high = max(0.0, value - chain.dynatemp_range), value + chain.dynatemp_range
        p = candidates.probs()
        entropy = -(p[p > 0.0] * np.log(p[p > 0.0])).sum() / math.log(len(candidates))
        value = low + (high - low) * entropy**chain.dynatemp_exponent
    if value < MIN_TEMPERATURE:
        candidates.first(1)
    else:
        candidates.scale(1.0 / value)


SAMPLERS: dict[str, Callable[[Candidates, SamplerOptions, SamplerContext], None]] = {
    "penalties": penalties,
    "dry": dry,
    "top_n_sigma": top_n_sigma,
    "top_k": top_k,
    "typ_p": typical,
    "tfs_z": tail_free,
    "top_p": top_p,
    "min_p": min_p,
    "xtc": xtc,
    "temperature": temperature,
}
"""Samplers by llama.cpp's names."""

IS_NOOP: dict[str, Callable[[SamplerOptions], bool]] = {
    "penalties": lambda c: (
        not c.repeat_last_n
        or (c.repeat_penalty, c.frequency_penalty, c.presence_penalty) == (1.0, 0.0, 0.0)
    ),
    "dry": lambda c: not c.dry_multiplier or c.dry_base < 1.0 or not c.dry_penalty_last_n,
    "top_n_sigma": lambda c: c.top_n_sigma <= 0.0,
    "top_k": lambda c: c.top_k <= 0,
    "typ_p": lambda c: c.typical_p >= 1.0,
    "tfs_z": lambda c: c.tfs_z >= 1.0,
    "top_p": lambda c: c.top_p >= 1.0,
    "min_p": lambda c: c.min_p <= 0.0,
    "xtc": lambda c: c.xtc_probability <= 0.0 or c.xtc_threshold > 0.5,
    "temperature": lambda c: False,
}
"""Predicates: True if the parameters disable a sampler."""

ALIASES = {"typical_p": "typ_p", "typical": "typ_p", "temp": "temperature", "tfs": "tfs_z",
               "top-k": "top_k", "top-p": "top_p", "min-p": "min_p", "typ-p": "typ_p",
               "top-n-sigma": "top_n_sigma", "nucleus": "top_p"}  # fmt: skip

LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "f": "tfs_z",
    "p": "top_p", "m": "min_p", "x": "xtc", "t": "temperature",
}  # fmt: skip
"""The letters of llama.cpp's ``--sampling-seq``."""


def n_lowered_by(name: str, chain: SamplerOptions, n_tokens: int) -> int | None:
    """Return the most tokens that a sampler lowers, after `n_tokens`.

    None if it has other effects: only lowering keeps the top candidates among the former ones.
    """
    if IS_NOOP[name](chain):
        return 0
    if name == "penalties":
        least = min(chain.repeat_penalty - 1.0, chain.frequency_penalty, chain.presence_penalty)
        window = chain.repeat_last_n
    elif name == "dry":
        least, window = 0.0, chain.dry_penalty_last_n
    else:
        return None
    return None if least < 0.0 else n_tokens if window < 0 else min(n_tokens, window)


def least_typical_last(p: np.ndarray) -> np.ndarray:
    """Sort tokens by the distance of their surprise from the entropy."""
    surprise = -np.log(np.maximum(p, np.finfo(np.float64).tiny))
    return np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")


def tail_free_count(p: np.ndarray, z: float, first_counts: bool = True) -> int:
    """Return the number of sorted probabilities before the flat tail, at least 1.

    Normalized second differences ``|p[i] - 2 p[i+1] + p[i+2]|`` are summed up to `z`; with
    `first_counts` False without the first, as in Inferflow.
    """
    bends = np.abs(np.diff(p, 2))
    if not len(bends):
        return len(p)
    total = bends.sum()
    shares = bends / total if total > 1e-6 else np.full(len(bends), 1.0 / len(bends))
    if not first_counts:
        shares[0] = 0.0
    passed = np.flatnonzero(np.cumsum(shares) > z)
    return max(int(passed[0]), 1) if len(passed) else len(p)


def _penalize(
    candidates: Candidates, context: SamplerContext, penalty: Callable[..., Any], **options: Any
) -> None:
    """Apply a penalty of `nbflow_kernels` for the tokens so far to the row of logits."""
    row = np.full((1, candidates.n_vocab), -np.inf, np.float32)
    row[0, candidates.ids] = candidates.logits
    penalty(row, context.history, np.array([0, len(context.history)], np.int32), **options)
    candidates.rescore(row[0, candidates.ids].astype(np.float64))
