r"""Fast random Hadamard rotations: N log N steps, random signs.

A rotation R (size, size) is orthogonal with entries of one magnitude, so that each column of
:math:`W R` averages all columns of W with random signs: outlier columns vanish.

.. math:: R = \mathrm{diag}(s) \frac{H}{\sqrt{n}}, \qquad s_i = \pm 1, \quad H H^T = n I

H is Sylvester's matrix where the size is a power of two.  Else it is the Kronecker product of one
with Paley's matrix of order q + 1, for a prime q that is 3 modulo 4: 12, 20, 24, 28 x 2, ...

Sources: R. E. A. C. Paley, "On orthogonal matrices", 1933; J. Chee et al., "QuIP", NeurIPS 2023,
arXiv:2307.13304, and A. Tseng et al., "QuIP#", ICML 2024, arXiv:2402.04396, for the random signs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.errors import UsageError

CHUNK = 1 << 21  # values rotated per pass: two float64 arrays of 16 MiB


class Rotation:
    """A random Hadamard rotation of vectors of a length that is a multiple of `size`.

    Parameters
    ----------
    size : int
        Length of the rotation; longer vectors are rotated in segments of this length, all alike.
    seed : int
        Seed of the signs.

    Raises
    ------
    UsageError
        If no Hadamard matrix of that size is known here.

    Examples
    --------
    >>> import numpy as np
    >>> turn = Rotation(24, seed=1)
    >>> x = np.random.default_rng(0).normal(size=(3, 48))
    >>> bool(np.allclose(turn.apply(turn.apply(x), inverse=True), x))
    True
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self.seed = seed
        self._order = paley_order(size)
        # one random stream per size, the same on every machine
        signs = np.random.Generator(np.random.PCG64([seed, size])).integers(0, 2, size)
        self.signs: NDArray[Any] = 1.0 - 2.0 * signs

    def apply(self, x: NDArray[Any], *, inverse: bool = False) -> NDArray[np.float64]:
        """Return ``x @ R`` along the last axis, or ``x @ R.T`` for the inverse.

        The last axis of `x` must be a multiple of the size.
        """
        if x.shape[-1] % self.size:
            raise UsageError(
                f"the last axis of x must be a multiple of {self.size}, got shape {x.shape}"
            )
        segments = x.reshape(-1, self.size)
        out = np.empty(segments.shape, np.float64)
        step = max(1, CHUNK // self.size)
        for first in range(0, len(segments), step):
            own = slice(first, first + step)
            wide = segments[own].astype(np.float64)
            if inverse:
                out[own] = _hadamard(wide, self._order, transposed=True) * self.signs
            else:
                out[own] = _hadamard(wide * self.signs, self._order)
        return out.reshape(x.shape)

    def rotate_moments(self, moments: NDArray[Any]) -> NDArray[np.float64]:
        """Return ``R.T M R``: second moments (K, K) of ``x @ R`` for rows x with moments M."""
        return self.apply(np.ascontiguousarray(self.apply(moments).T))


def paley_order(size: int) -> int:
    """Return the order of Paley's factor: 1 for powers of two, else the smallest q + 1."""
    if size < 1:
        raise UsageError(f"the size of a rotation must be at least 1, got {size}")
    rest = size & -size  # the largest power of two that divides it
    order = odd = size // rest
    if order == 1:
        return 1
    while rest > 1:
        order, rest = order * 2, rest // 2
        if order % 4 == 0 and _is_prime(order - 1):
            return order
    raise UsageError(
        f"no Hadamard matrix of order {size} is known: none of {odd} x 2, 4, ... up to "
        f"{size} is one more than a prime that is 3 modulo 4"
    )


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


@lru_cache(maxsize=8)
def _paley(order: int) -> NDArray[np.float64]:
    """Return Paley's Hadamard matrix (order, order): I + S, S skew with the quadratic residues."""
    q = order - 1
    residues = np.full(q, -1.0)
    residues[np.unique(np.arange(1, q) ** 2 % q)] = 1.0
    residues[0] = 0.0
    matrix = np.zeros((order, order))
    matrix[0, 1:], matrix[1:, 0] = 1.0, -1.0
    matrix[1:, 1:] = residues[(np.arange(q)[:, None] - np.arange(q)) % q]
    result: NDArray[np.float64] = matrix + np.eye(order)
    return result


def _hadamard(
    x: NDArray[np.float64], order: int, *, transposed: bool = False
) -> NDArray[np.float64]:
    """Return rows (n, size) times H / sqrt(size), in butterflies; `x` is overwritten."""
    n, size = x.shape
    if order > 1:
        factor = _paley(order)
        x = (x.reshape(-1, order) @ (factor.T if transposed else factor)).reshape(n, size)
    width = order
    while width < size:  # Sylvester's part is symmetric
        pairs = x.reshape(n, -1, 2, width)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        total = first + second
        np.subtract(first, second, out=second)
        pairs[:, :, 0] = total
        width *= 2
    x *= size**-0.5
    return x
