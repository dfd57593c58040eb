"""User-defined weight formats: a class of about twenty lines, registered by name.

>>> import numpy as np
>>> import nbflow_kernels as nk
>>> from nbflow_kernels.formats.block_bytes import get_f16, put_f16
>>> class Signs:
...     name = "signs_b16"
...     block_size = 16
...     block_bytes = 4
...
...     @staticmethod
...     def quantize_block(x, out):  # float32 (16,), uint8 (4,)
...         put_f16(out, 0, np.abs(x).mean())
...         out[2] = out[3] = 0
...         for i in range(16):
...             out[2 + i // 8] |= (x[i] > 0) << (i % 8)
...
...     @staticmethod
...     def dequantize_block(block, out):  # uint8 (4,), float32 (16,)
...         for i in range(16):
...             bit = (block[2 + i // 8] >> (i % 8)) & 1
...             out[i] = get_f16(block, 0) * (2 * bit - 1)
>>> nk.register_format(Signs)
<UserFormat signs_b16: 2 bits per weight>
>>> nk.dequantize(nk.quantize(np.float32([2, -2] * 8), "signs_b16"))[:4]
array([ 2., -2.,  2., -2.], dtype=float32)
>>> nk.unregister_format("signs_b16")

Numba compiles the functions: plain loops over numbers, NumPy scalars and array elements.  Each call
handles one block.  Inputs are read-only; ``out`` is uninitialized, so write every element.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import user_jit as user_code
from nbflow_kernels.formats.codec_spec import CodecSpec, DecodedBlocks
from nbflow_kernels.formats.registry import FORMATS, Bytes, Floats, QuantFormat
from nbflow_kernels.formats.user_jit import UserCode, user_error
from nbflow_kernels.formats.user_validation import check

ENCODE_COST, DECODE_COST = 50.0, 10.0  # operations per weight, for the choice of thread count
MAX_BLOCK = 4096

REQUIRED = ("quantize_block", "dequantize_block")
OPTIONAL = ("quantize_block_weighted", "code", "d", "m", "scale", "min")


class UserFormat(QuantFormat):
    """Weight format made from a user's class; see `register_format`."""

    def __init__(self, user_class: type, code: UserCode, form: CodecSpec | None) -> None:
        self.user_class = user_class
        self.code = code
        self.form = form
        self.name = code.name
        self.block_size = code.block_size
        self.block_bytes = code.block_bytes

    @property
    def digest(self) -> str:
        """Digest of the source file, which identifies the format along with its name."""
        return self.code.digest

    @property
    def decodes_from_storage(self) -> bool:
        """See `QuantFormat.decodes_from_storage`."""
        return self.form is None

    def quantize_rows(
        self, x: Floats, n_columns: int, quantizer: str, importance: Floats | None = None
    ) -> Bytes:
        """Quantize rows; both quantizers call the user's function."""
        width = x.shape[1]
        data = np.zeros((len(x), width // self.block_size * self.block_bytes), np.uint8)
        x = _read_only(x)
        kernel: Any
        args: tuple[Any, ...]
        if importance is None:
            kernel, args = user_code.quantizer(self.code), (x, data)
        elif "quantize_block_weighted" not in self.code.functions:
            raise UsageError(
                f"format {self.name} knows no importance; give its class a static method "
                "quantize_block_weighted(x, weight, out)"
            )
        else:
            weight = _read_only(np.ascontiguousarray(importance, np.float32))
            kernel, args = user_code.weighted_quantizer(self.code), (x, weight, data)
        self._run("quantize_block", kernel, len(x), ENCODE_COST * x.size, *args)
        return data

    def dequantize_blocks(self, blocks: Bytes) -> Floats:
        """Dequantize blocks (n, block_bytes) to float32 (n, block_size)."""
        out = np.empty((len(blocks), self.block_size), np.float32)
        self.dequantize_rows(np.ascontiguousarray(blocks), out)
        return out

    def dequantize_rows(self, data: Bytes, out: Floats) -> None:
        """Write the weights of rows; see `QuantFormat.dequantize_rows`."""
        kernel = user_code.decoder(self.code)
        self._run("dequantize_block", kernel, len(data), DECODE_COST * out.size, data, out)

    @property
    def integer_form(self) -> CodecSpec:
        """See `QuantFormat.integer_form`."""
        return self.form if self.form is not None else super().integer_form

    def integers(self, data: Bytes) -> DecodedBlocks:
        """See `QuantFormat.integers`."""
        if self.form is None:
            return super().integers(data)
        form, n_rows = self.form, len(data)
        columns = data.shape[1] // self.block_bytes * self.block_size
        codes = np.zeros((n_rows, columns), np.uint8)
        d, m = (np.zeros((n_rows, columns // form.block), np.float32) for _ in "dm")
        scales = np.zeros((n_rows, columns // form.sub_block), np.int16)
        mins = np.zeros(scales.shape, np.uint8)
        kernel = user_code.integer_decoder(self.code, form)
        args = (np.ascontiguousarray(data), codes, d, m, scales, mins)
        self._run("code", kernel, n_rows, DECODE_COST * codes.size, *args)
        return DecodedBlocks(
            codes,
            d,
            m if form.base != "none" else None,
            scales if form.scales else None,
            mins if form.base == "min" else None,
        )

    def _run(self, function: str, kernel: Any, n_rows: int, work: float, *args: Any) -> None:
        """Run a kernel; an exception in the user's code names its line."""
        try:
            parallel_for(kernel, n_rows, work, *args)
        except Exception as error:
            raise user_error(self.name, function, self.code.functions, error) from error


def _read_only(array):
    view = array.view()
    view.flags.writeable = False
    return view


# ---- registering ---------------------------------------------------------------------------------


def register_format(user_class: Any) -> UserFormat:
    """Register a class as a weight format equal to the built-in ones.

    Parameters
    ----------
    user_class : type
        ``name``
            Lower-case letters, digits and underscores; must differ from the built-in names.
        ``block_size``, ``block_bytes``
            Weights per block, 1 to 4096, and bytes per block.
        ``quantize_block(x, out)``
            Static: quantizes finite weights `x`, float32 (block_size,), to `out`, uint8
            (block_bytes,).  Serves as both quantizers, "reference" and "search".
        ``dequantize_block(block, out)``
            Static: dequantizes a block to `out`, float32 (block_size,).
        ``quantize_block_weighted(x, weight, out)``
            Static, optional: importance-weighted quantizer; `weight` is float32 (block_size,), 0
            for padding.
        ``integer_form``, ``code(block, i)``, ``d(block, j)`` and, as the form has them,
        ``m(block, j)``, ``scale(block, s)``, ``min(block, s)``
            Optional: the decode formula, a `nbflow_kernels.formats.codec_spec.CodecSpec`, and
            static functions that return its numbers: the code of weight i, `d` and `m` of the j-th
            group of ``integer_form.block`` weights, scale and min of sub-block s.  With them,
            matmuls run in the kernels of the built-in formats.

    Returns
    -------
    UserFormat
        The format, which is now in `nbflow_kernels.FORMATS`.

    Raises
    ------
    UsageError
        If the name is taken, an attribute is missing, a function does not compile, or
        `nbflow_kernels.formats.user_validation.check` fails: decoded weights must be finite and
        deterministic for random, constant, zero, tiny and huge weights.

    See Also
    --------
    nbflow_kernels.check_format : All checks, matmuls included.
    nbflow_kernels.load_plugin : Import a file that registers formats.

    Notes
    -----
    Compiled kernels are cached on disk if the class is defined in a file.  The key is the digest of
    that file: an edit there recompiles, an edit in a file that it imports does not.

    Examples
    --------
    >>> import nbflow_kernels as nk
    >>> nk.register_format(float)
    Traceback (most recent call last):
    nbflow_kernels.errors.UsageError: class float: a format needs name; it has none
    """
    format = _make(user_class)
    before = FORMATS.get(format.name)
    if isinstance(before, UserFormat):
        if before.user_class is user_class or before.digest == format.digest:
            FORMATS.note(before)
            return before
        raise UsageError(
            f"a format {format.name!r} is registered already, with another class; choose another "
            f"name, or call unregister_format({format.name!r}) first"
        )
    if before is not None or format.name in FORMATS:
        raise UsageError(f"{format.name!r} is a built-in format; choose another name")
    check(format)
    FORMATS.add(format)
    return format


def unregister_format(name: str) -> None:
    """Remove a registered format; existing tensors in it keep working.

    Raises
    ------
    UsageError
        If it is unknown or a built-in one.
    """
    format = FORMATS[name]
    if not isinstance(format, UserFormat):
        raise UsageError(f"{name!r} is a built-in format, which cannot be unregistered")
    FORMATS.remove(format.name)


def _make(user_class: Any) -> UserFormat:
    """Make the format of a class, uncompiled; raise if an attribute is missing or invalid."""
    if not isinstance(user_class, type):
        raise TypeError(f"register_format takes a class, got {type(user_class).__name__}")
    where = f"class {user_class.__name__}"
    given: Any = user_class
    for part in ("name", "block_size", "block_bytes", *REQUIRED):
        if not hasattr(user_class, part):
            raise UsageError(f"{where}: a format needs {part}; it has none")
    name = given.name
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UsageError(
            f"{where}: name must be lower-case letters, digits and underscores, got {name!r}"
        )
    for part, most in (("block_size", MAX_BLOCK), ("block_bytes", 1 << 20)):
        value = getattr(user_class, part)
        if not isinstance(value, int) or not 1 <= value <= most:
            raise UsageError(f"{where}: {part} must be an integer in 1..{most}, got {value!r}")
    form = getattr(user_class, "integer_form", None)
    functions = {k: _function(user_class, k) for k in REQUIRED}
    functions |= {k: _function(user_class, k) for k in OPTIONAL if hasattr(user_class, k)}
    if form is not None:
        _check_form(user_class, form, functions)
    digest, on_disk = _source_digest(user_class)
    code = UserCode(name, digest, on_disk, given.block_size, given.block_bytes, functions)
    return UserFormat(user_class, code, form)


def _function(user_class: Any, name: str) -> Callable[..., Any]:
    """Return a static function of the class, uncompiled."""
    where = f"class {user_class.__name__}: {name}"
    raw = inspect.getattr_static(user_class, name)
    function = raw.__func__ if isinstance(raw, staticmethod) else raw
    function = getattr(function, "py_func", function)
    if not inspect.isfunction(function):
        raise UsageError(f"{where} must be a function, got {type(function).__name__}")
    if not isinstance(raw, staticmethod) and "self" in inspect.signature(function).parameters:
        raise UsageError(f"{where} must be a @staticmethod, without self")
    wanted = 3 if name == "quantize_block_weighted" else 2
    found = len(inspect.signature(function).parameters)
    if found != wanted:
        raise UsageError(f"{where} must take {wanted} arguments, it takes {found}")
    return function


def _check_form(user_class: Any, form: Any, functions: dict[str, Any]) -> None:
    where = f"class {user_class.__name__}"
    if not isinstance(form, CodecSpec):
        raise UsageError(
            f"{where}: integer_form must be a nbflow_kernels.formats.codec_spec.CodecSpec, got "
            f"{type(form).__name__}"
        )
    if user_class.block_size % form.block:
        raise UsageError(f"{where}: block_size must be a multiple of integer_form.block")
    needed = ["code", "d"]
    needed += ["m"] if form.base != "none" else []
    needed += ["scale"] if form.scales else []
    needed += ["min"] if form.base == "min" else []
    for name in needed:
        if name not in functions:
            raise UsageError(f"{where}: with this integer_form it needs a static method {name}")


def _source_digest(user_class: Any) -> tuple[str, bool]:
    """Return the digest of a class's source file and True, or a random one and False."""
    try:
        file = Path(inspect.getfile(user_class))
        content = file.read_bytes()
    except (OSError, TypeError):  # defined in a notebook or a shell
        return uuid.uuid4().hex, False
    return hashlib.sha256(content + user_class.__qualname__.encode()).hexdigest()[:32], True
