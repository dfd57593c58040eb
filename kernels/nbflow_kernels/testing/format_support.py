"""Table of the operations that each format supports, with the reason where it does not."""

from __future__ import annotations

from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS, QuantFormat
from nbflow_kernels.formats.floats import FloatFormat
from nbflow_kernels.formats.trellis import TrellisFormat
from nbflow_kernels.formats.user import UserFormat
from nbflow_kernels.quantizers.registry import takes_importance

YES = "yes"
NO_INT8 = "int8 activations go with integer codes; a float format is multiplied in f32 or bf16."
NO_IMPORTANCE = (
    "The published quantizer (reference) takes no importance weights; the quantizer search does."
)
NO_CUDA_SEARCH = "Paths through a trellis are searched in host memory; take to_device() after it."

OPERATIONS: tuple[str, ...] = (
    "dequantize, row gather",
    "quantize reference",
    "quantize search",
    "importance reference",
    "importance search",
    "outliers",
    "GEMV, GEMM f32",
    "GEMV, GEMM bf16",
    "GEMV, GEMM int8",
    "KV append, gather, attention",
    "CUDA: dequantize, row gather",
    "CUDA: quantize reference",
)


def cells(format: QuantFormat) -> list[str]:
    """Return for each of `OPERATIONS` "yes", or the reason why a format cannot do it.

    Examples
    --------
    >>> from nbflow_kernels import FORMATS
    >>> cells(FORMATS["q4_k"])[:8] == ["yes"] * 8
    True
    >>> cells(FORMATS["f16"])[8].startswith("int8 activations go with integer codes")
    True
    """
    is_float = isinstance(format, FloatFormat)
    return [
        YES,
        YES,
        YES,
        _importance(format, "reference"),
        _importance(format, "search"),
        "A float format stores each weight alone, none stretches the others' range."
        if is_float
        else YES,
        YES,
        YES,
        YES if format.takes_int8 else NO_INT8,
        _cache(format),
        YES,
        NO_CUDA_SEARCH if isinstance(format, TrellisFormat) else YES,
    ]


def _importance(format: QuantFormat, quantizer: str) -> str:
    """Return whether a quantizer takes importance weights."""
    if quantizer == "search" and not isinstance(format, UserFormat):
        return YES
    if takes_importance(format):
        return YES
    if isinstance(format, UserFormat):
        return "The class has no quantize_block_weighted."
    return NO_IMPORTANCE


def _cache(format: QuantFormat) -> str:
    """Return whether the key/value cache can have a format."""
    from nbflow_kernels.kv_cache.formats import kv_format

    try:
        kv_format(format.name)
    except UsageError as error:
        reason = str(error).split("; ")[0].replace(f"weight format {format.name}", "this format")
        return f"{reason[0].upper()}{reason[1:]}."
    return YES


def support_table() -> str:
    """Return a Markdown table of the operations that some formats lack."""
    missing: dict[tuple[str, str], list[str]] = {}
    for name, format in FORMATS.items():
        for operation, cell in zip(OPERATIONS, cells(format), strict=True):
            if cell != YES:
                missing.setdefault((operation, cell), []).append(f"`{name}`")
    lines = [
        f"| {operation} | {' '.join(names)} | {reason} |"
        for (operation, reason), names in missing.items()
    ]
    return "\n".join(["| operation | formats without it | reason |", "|---|---|---|", *lines])
