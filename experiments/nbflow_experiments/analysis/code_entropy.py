"""Code usage of a quantized tensor: level frequencies and their entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels import QuantTensor
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.codec_spec import CodecSpec

CHUNK_WEIGHTS = 1 << 22
PAIR_BITS = 3.5  # two codes 0..10 are stored in 7 bits


@dataclass(frozen=True)
class CodeUse:
    """Level frequencies of a tensor's codes.

    A level is the value of a code before scaling: codes of equal value (0 and -0 of a 4-bit float)
    count as one.  Padding is excluded.
    """

    counts: NDArray[np.int64]
    """Count of each level, from the least to the largest."""
    stored_bits: float
    """Bits of a code in the format; NaN where codes are not stored one by one (grids, base 3)."""

    @property
    def used_share(self) -> float:
        """Return the share of levels in use."""
        return float(np.count_nonzero(self.counts) / len(self.counts))

    @property
    def entropy_bits(self) -> float:
        """Return the entropy of the levels' frequencies, in bits."""
        share = self.counts[self.counts > 0] / self.counts.sum()
        return float(-np.sum(share * np.log2(share))) + 0.0  # no -0


def code_use(tensor: QuantTensor) -> CodeUse | None:
    """Count the levels of a tensor's codes; None for formats that have no codes.

    Examples
    --------
    >>> import numpy as np
    >>> import nbflow_kernels as nk
    >>> w = np.tile(np.float32([0, 1, 2, 3]), (1, 8))
    >>> use = code_use(nk.quantize(w, "q2", quantizer="reference"))
    >>> use.counts.tolist(), use.entropy_bits
    ([8, 8, 8, 8], 2.0)
    """
    format = tensor.format
    try:
        form = format.integer_form
    except UsageError:
        return None
    levels = _levels(form, getattr(format, "n_codes", None))
    n_columns = tensor.shape[-1]
    counts = np.zeros(int(levels.max()) + 1, np.int64)
    step = max(1, CHUNK_WEIGHTS // n_columns)
    for start in range(0, tensor.n_rows, step):
        rows = tensor.data[start : start + step]
        codes = format.integers(np.ascontiguousarray(rows)).codes[:, :n_columns]
        counts += np.bincount(levels[codes.ravel()], minlength=len(counts))
    bits = PAIR_BITS if form.pairs else float(form.code_bits)
    return CodeUse(counts, bits if bits <= format.bits_per_weight else math.nan)


def _levels(form: CodecSpec, n_codes: int | None) -> NDArray[np.int64]:
    """Return the level index of each code, 0 for the smallest."""
    if form.values is None:
        return np.arange(n_codes or 2**form.code_bits)
    return np.unique(np.array(form.values), return_inverse=True)[1].astype(np.int64)
