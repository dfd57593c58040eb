"""Effect of a weight transform on the tensors of a model and on statistics of their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.quantizers.hadamard import Rotation

Wide = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ChannelScale:
    """Multiplication of each vector entry by its factor."""

    values: Wide
    """The factors (K,)."""

    def apply(self, x: NDArray[Any]) -> Wide:
        """Scale rows (..., K)."""
        result: Wide = x * self.values
        return result

    def moments(self, statistics: Wide) -> Wide:
        """Return mean squares (K,) or second moments (K, K) of inputs *divided* by the factors.

        Statistics of entries with factor 0 become 0.
        """
        with np.errstate(divide="ignore"):
            inverse = np.where(self.values == 0, 0.0, 1 / self.values)
        if statistics.ndim == 1:
            squares: Wide = statistics * inverse**2
            return squares
        result: Wide = statistics * inverse * inverse[:, None]
        return result


@dataclass(frozen=True, eq=False)
class HadamardRotation:
    """Rotation of vectors, or of each of their segments alike."""

    rotation: Rotation

    def apply(self, x: NDArray[Any]) -> Wide:
        """Rotate rows (..., K)."""
        return self.rotation.apply(x)

    def moments(self, statistics: Wide) -> Wide:
        """Return mean squares (K,) or second moments (K, K) of rotated inputs.

        Mean squares become their mean over each segment, as the entries of a rotation have one
        magnitude: exact for uncorrelated inputs.
        """
        if statistics.ndim == 2:
            return self.rotation.rotate_moments(statistics)
        segments = statistics.reshape(-1, self.rotation.size)
        return np.repeat(segments.mean(axis=1), self.rotation.size)


LinearMap = ChannelScale | HadamardRotation
"""A linear map of row vectors."""


@dataclass(frozen=True)
class WeightTransform:
    """Weights changed such that the model computes the same function.

    Names are ours.  In y = x W^T with W (N, K), maps of `columns` apply to the rows of W, so that
    the inputs must be divided by the factors, or rotated; maps of `rows` apply to the columns of W
    and to the bias.
    """

    spec: ModelSpec
    """The new specification; a tied head may become untied."""
    columns: Mapping[str, tuple[LinearMap, ...]] = field(default_factory=dict)
    """Matrix -> maps of its rows, in order."""
    rows: Mapping[str, tuple[LinearMap, ...]] = field(default_factory=dict)
    """Matrix or bias -> maps of its columns (of the vector), in order."""
    vectors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """New weights and biases of norms."""
    notes: tuple[str, ...] = ()

    def changes(self, name: str) -> bool:
        """Return True if the transform changes a tensor."""
        return name in self.columns or name in self.rows or name in self.vectors

    def apply(self, name: str, values: NDArray[Any]) -> NDArray[np.float32]:
        """Transform a tensor (N, K) or (N,) in float64, rounded once to float32."""
        if name in self.vectors:
            return self.vectors[name]
        wide = values
        for change in self.columns.get(name, ()):
            wide = change.apply(wide)
        for change in self.rows.get(name, ()):
            wide = change.apply(wide.T).T
        return np.ascontiguousarray(wide, np.float32)

    def statistics(self, name: str, statistics: NDArray[Any]) -> NDArray[np.float32]:
        """Transform mean squares (K,) or second moments (K, K) of a matrix's inputs."""
        wide = np.asarray(statistics, np.float64)
        for change in self.columns.get(name, ()):
            wide = change.moments(wide)
        return wide.astype(np.float32)
