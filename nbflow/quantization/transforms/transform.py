"""What a transform does to each tensor of a model and to what is known about its inputs."""

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
    """Multiplies each entry of a vector by a factor of its own."""

    values: Wide
    """The factors (K,)."""

    def apply(self, x: NDArray[Any]) -> Wide:
        """Return rows (..., K) with their entries multiplied."""
        result: Wide = x * self.values
        return result

    def moments(self, statistics: Wide) -> Wide:
        """Return mean squares (K,) or second moments (K, K) of inputs that are *divided* by them.

        What is multiplied by 0 says nothing and stays 0.
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
    """Rotates vectors, or each piece of them alike."""

    rotation: Rotation

    def apply(self, x: NDArray[Any]) -> Wide:
        """Return rows (..., K) rotated."""
        return self.rotation.apply(x)

    def moments(self, statistics: Wide) -> Wide:
        """Return mean squares (K,) or second moments (K, K) of inputs that are rotated alike.

        Of mean squares alone, nothing but their mean in each piece is known afterwards: entries of
        a rotation are of one size, so that this is exact for inputs without correlation.
        """
        if statistics.ndim == 2:
            return self.rotation.rotate_moments(statistics)
        pieces = statistics.reshape(-1, self.rotation.size)
        return np.repeat(pieces.mean(axis=1), self.rotation.size)


LinearMap = ChannelScale | HadamardRotation
"""A linear map of row vectors."""


@dataclass(frozen=True)
class WeightTransform:
    """A model with other weights that computes the same.

    Names are ours.  The weights W (N, K) of a matrix become those of y = x W^T with inputs and
    outputs that are folded: maps of `columns` are applied to its rows, so that the inputs must come
    divided by factors and rotated; maps of `rows` are applied to its columns and its bias.
    """

    spec: ModelSpec
    """The specification afterwards: a tied head may have come apart."""
    columns: Mapping[str, tuple[LinearMap, ...]] = field(default_factory=dict)
    """Matrix -> maps of its rows, in order."""
    rows: Mapping[str, tuple[LinearMap, ...]] = field(default_factory=dict)
    """Matrix or bias -> maps of its columns (of the vector), in order."""
    vectors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Weights and biases of norms that are replaced."""
    notes: tuple[str, ...] = ()
    """What the user should know."""

    def changes(self, name: str) -> bool:
        """Return whether a tensor is another one afterwards."""
        return name in self.columns or name in self.rows or name in self.vectors

    def apply(self, name: str, values: NDArray[Any]) -> NDArray[np.float32]:
        """Return a tensor (N, K) or (N,) as it is afterwards; float64 inside, rounded once."""
        if name in self.vectors:
            return self.vectors[name]
        wide = values
        for change in self.columns.get(name, ()):
            wide = change.apply(wide)
        for change in self.rows.get(name, ()):
            wide = change.apply(wide.T).T
        return np.ascontiguousarray(wide, np.float32)

    def statistics(self, name: str, statistics: NDArray[Any]) -> NDArray[np.float32]:
        """Return mean squares (K,) or second moments (K, K) of a matrix's inputs afterwards."""
        wide = np.asarray(statistics, np.float64)
        for change in self.columns.get(name, ()):
            wide = change.moments(wide)
        return wide.astype(np.float32)
