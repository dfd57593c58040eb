"""KL divergence of a model's predictions from the float32 model."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow_experiments.scoring.estimates import estimate_mean, estimate_share

Floats = NDArray[np.float32]


class Comparison:
    """Per-token scores of a text, accumulated window by window."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]] = []

    def add(self, exact: Floats, found: Floats, targets: NDArray[np.int32]) -> None:
        """Add the float32 and the compared logits (T, V) of a window."""
        shift = nk.token_log_probs(exact, targets) - nk.token_log_probs(found, targets)
        same = nk.top1_agreement(exact, found)
        self._parts.append((nk.kl_divergence(exact, found), shift, same))

    @property
    def divergence(self) -> NDArray[np.float64]:
        """Return KL(float32 || other) of each token, in nats."""
        return np.concatenate([part[0] for part in self._parts])

    @property
    def nll_difference(self) -> NDArray[np.float64]:
        """Return the increase of each token's negative log likelihood, in nats."""
        return np.concatenate([part[1] for part in self._parts])

    def row(self) -> dict[str, Any]:
        """Return the table columns, named as in sweeps."""
        kld, nll = estimate_mean(self.divergence), estimate_mean(self.nll_difference)
        same = estimate_share(np.concatenate([part[2] for part in self._parts]))
        return {
            "kld_mean_nats": kld.mean,
            "kld_mean_nats_stderr": kld.stderr,
            "nll_difference_mean_nats": nll.mean,
            "nll_difference_mean_nats_stderr": nll.stderr,
            "top1_agreement_share": same.mean,
            "tokens": kld.n,
        }
