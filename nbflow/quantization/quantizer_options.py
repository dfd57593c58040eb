"""Options of a quantizer, with the statistics of the matrices' inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError
from nbflow_kernels.quantizers import AUTO, DAMPING, quantize_calibrated
from nbflow_kernels.quantizers.gptq import Hessian

Importance = Mapping[str, NDArray[Any]]
Range = tuple[float, float]
GPTQ_NEEDS = (
    "quantizer 'gptq' needs second moments of the inputs: nbflow imatrix MODEL --full -o "
    "FILE.safetensors, then --importance FILE.safetensors"
)


@dataclass(frozen=True)
class QuantizerOptions:
    """Quantizer of a model's matrices and its options.

    Examples
    --------
    >>> import numpy as np
    >>> w = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    >>> QuantizerOptions("hqq").quantize_matrix("layers.0.attn.q.weight", w, "q3h")
    QuantTensor(q3h_b64t1, shape=(4, 64), nbytes=128)
    """

    quantizer: str = AUTO
    """One of `nbflow_kernels.quantizers.QUANTIZER_NAMES`."""
    importance: Importance = field(default_factory=dict)
    """Our name of a matrix -> mean squares (K,) or second moments (K, K) of its inputs."""
    act_order: bool = False
    """True if GPTQ processes the columns with the largest inputs first."""
    damping: float = DAMPING
    """Added to the diagonal of second moments by GPTQ, relative to the mean of the diagonal."""
    outliers: float = 0.0
    _last: list[tuple[NDArray[Any], Hessian]] = field(
        default_factory=list, repr=False, compare=False
    )

    @property
    def needs_only_rows(self) -> bool:
        """Return True if a row's bytes depend on its weights alone."""
        return not (self.needs_whole_rows or self.importance or self.outliers)

    @property
    def needs_range(self) -> bool:
        """Return True if quantizing part of a matrix requires its outlier range."""
        return self.outliers > 0 and self.quantizer != "outliers"

    @property
    def needs_whole_rows(self) -> bool:
        """Return True if blocks of a row depend on other blocks of the row."""
        return self.quantizer in ("gptq", "hqq", "outliers")

    def quantize_matrix(
        self,
        name: str,
        rows: NDArray[Any],
        format: str,
        *,
        columns: tuple[int, int] | None = None,
        outlier_range: Range | None = None,
    ) -> nk.QuantTensor:
        """Quantize rows (N, K) of one of our matrices.

        Parameters
        ----------
        name : str
            Our name of the matrix.
        rows : array of float, shape (N, K)
            Rows of the matrix, or some columns of them.
        format : str
            The format.
        columns : (start, stop), optional
            Range of the columns; all by default.
        outlier_range : tuple of float, optional
            See `nbflow_kernels.quantize`.
        """
        known = self.importance.get(name)
        if known is not None and columns is not None:
            known = known[slice(*columns)] if known.ndim == 1 else known.diagonal()[slice(*columns)]
        try:
            return self.quantize(rows, format, known, outlier_range)
        except UsageError as error:
            raise UsageError(f"tensor {name}: {error}") from error

    def quantize(
        self,
        rows: NDArray[Any],
        format: str,
        known: NDArray[Any] | None = None,
        outlier_range: Range | None = None,
    ) -> nk.QuantTensor:
        """Quantize rows (N, K) with mean squares (K,) or second moments (K, K) of the inputs.

        Float formats round each weight with every quantizer.
        """
        if nk.FORMATS[format].block_size == 1:
            return nk.quantize(rows, format)
        if self.quantizer in nk.quantizers.FORMAT_QUANTIZER_NAMES:
            squares = known if known is None or known.ndim == 1 else known.diagonal()
            return nk.quantize(
                rows, format, quantizer=self.quantizer, importance=squares, outliers=self.outliers,
                outlier_range=outlier_range,
            )  # fmt: skip
        statistics: NDArray[Any] | Hessian | None = known
        if self.quantizer == "gptq":
            if known is None or known.ndim != 2:
                raise UsageError(GPTQ_NEEDS)
            statistics = self._hessian(known)
        return quantize_calibrated(
            rows,
            format,
            self.quantizer,
            statistics,
            act_order=self.act_order,
            outliers=self.outliers,
        )

    def _hessian(self, known: NDArray[Any]) -> Hessian:
        """Return the Hessian; the last is cached for matrices with the same inputs."""
        if not self._last or self._last[0][0] is not known:
            self._last[:] = [(known, Hessian(known, self.damping))]
        return self._last[0][1]


DEFAULT = QuantizerOptions()
