"""Validation of a user-defined format at registration: a few blocks, through compiled functions."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import codec_spec as integers
from nbflow_kernels.formats.layout_cpu import packed_form
from nbflow_kernels.formats.user_jit import user_error

GUARD = 64  # bytes behind a block, in bounds of the buffer


def sample_blocks(size: int) -> dict[str, NDArray[np.float32]]:
    """Return test blocks (n, size) by the kind of their weights."""
    rng = np.random.default_rng(0)
    normal = rng.normal(0, 0.02, (16, size)).astype(np.float32)
    spike = normal[:1].copy()
    spike[0, size // 2] = 8.0
    return {
        "normal": normal,
        "wide": rng.normal(0, 100, (4, size)).astype(np.float32),
        "positive": np.abs(normal[:4]),
        "negative": -np.abs(normal[:4]),
        "zero": np.zeros((1, size), np.float32),
        "constant": np.repeat(np.array([[0.37], [-0.37]], np.float32), size, axis=1),
        "one spike": spike,
        "tiny": normal[:2] * np.float32(1e-30),
        "huge": np.clip(normal[:2] * np.float32(1e5), -30000, 30000),
    }


def check(format: Any) -> None:
    """Raise `UsageError` unless the functions of a format keep the contract of `register_format`.

    `format` is a `nbflow_kernels.formats.user.UserFormat`.
    """
    functions = format.code.functions
    # bounds checks, and read-only inputs, catch the common mistakes
    options: dict[str, Any] = {"boundscheck": True, "error_model": "numpy"}
    compiled = {name: numba.njit(**options)(functions[name]) for name in functions}
    for kind, blocks in sample_blocks(format.block_size).items():
        for x in blocks:
            name = "quantize_block"
            try:
                block, again = (_encoded(format, compiled[name], x, fill) for fill in (0, 255))
                name = "dequantize_block"
                values = _decoded(format, compiled[name], block)
                same = _decoded(format, compiled[name], block)
            except Exception as error:
                if isinstance(error, UsageError):
                    raise
                raise user_error(format.name, name, functions, error) from error
            _check_block(format, kind, block, again, values, same)
    _check_kernels(format)
    if format.form is not None:
        _check_form(format)


def _encoded(format: Any, encode: Any, x: Any, fill: int) -> Any:
    """Quantize a block into a buffer filled with `fill`."""
    room = np.full(format.block_bytes + GUARD, fill, np.uint8)
    read_only = x.copy()
    read_only.flags.writeable = False
    encode(read_only, room[: format.block_bytes])
    return room[: format.block_bytes]


def _decoded(format: Any, decode: Any, block: Any) -> Any:
    out = np.full(format.block_size, np.nan, np.float32)
    read_only = block.copy()
    read_only.flags.writeable = False
    decode(read_only, out)
    return out


def _check_block(format: Any, kind: str, block: Any, again: Any, values: Any, same: Any) -> None:
    if not np.array_equal(block, again):
        at = int(np.argmax(block != again))
        raise UsageError(
            f"format {format.name}: quantize_block gives other bytes for the same block of {kind} "
            f"weights, first at byte {at}: it must write every byte of out, and not read them first"
        )
    if not np.isfinite(values).all():
        at = int(np.argmax(~np.isfinite(values)))
        raise UsageError(
            f"format {format.name}: dequantize_block gives {values[at]} for weight {at} of a block "
            f"of {kind} weights; decoded weights must be finite, and all must be written"
        )
    if not np.array_equal(values, same):
        raise UsageError(f"format {format.name}: dequantize_block is not deterministic")


def _check_kernels(format: Any) -> None:
    """Check the compiled row kernels: decoded weights are finite, also with importances."""
    x = np.concatenate(list(sample_blocks(format.block_size).values()))
    data = format.quantize_rows(x, format.block_size, "reference")
    values = format.dequantize_blocks(data)
    if not np.isfinite(values).all():
        raise UsageError(f"format {format.name}: decoded weights are not finite")
    if "quantize_block_weighted" in format.code.functions:
        ones = np.ones((1, format.block_size), np.float32)
        weighted = format.quantize_rows(x, format.block_size, "reference", ones)
        if not np.isfinite(format.dequantize_blocks(weighted)).all():
            raise UsageError(
                f"format {format.name}: weights from quantize_block_weighted are not finite"
            )


def _check_form(format: Any) -> None:
    """Raise unless the integer form is bit-identical to `dequantize_block`."""
    assert format.form is not None
    packed_form(format.form)  # raises for forms without kernels
    x = np.concatenate(list(sample_blocks(format.block_size).values()))
    data = format.quantize_rows(x, format.block_size, "reference")
    parts = format.integers(data)
    n_codes = 11 if format.form.pairs else 2**format.form.code_bits
    if int(parts.codes.max()) >= n_codes:
        raise UsageError(
            f"format {format.name}: code gives {int(parts.codes.max())}, but integer_form allows "
            f"0..{n_codes - 1}"
        )
    with np.errstate(all="ignore"):
        wanted = integers.weights(format.form, parts)
    found = format.dequantize_blocks(data)
    if not np.array_equal(wanted, found):
        row, i = (int(v) for v in np.argwhere(wanted != found)[0])
        raise UsageError(
            f"format {format.name}: dequantize_block gives {found[row, i]!r} for weight {i} of a "
            f"block, the integer form gives {wanted[row, i]!r}; both must be the formula, rounded "
            "once to float32"
        )
    format.pack(lambda start, stop: data[start:stop], len(data), 1)
