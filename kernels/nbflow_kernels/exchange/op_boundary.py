"""The boundary of the public ops: any library's arrays and half precision in, the same out.

Kernels take NumPy and CuPy arrays, most of them of float32 and int32.  `public` wraps a function or
the methods of a class, so that a call may pass

- arrays of any library with DLPack or the CUDA array interface, without a copy; results are of the
  library of the first array;
- float16 and bfloat16 where a kernel computes in float32: widened before the call, and results
  are rounded to the type of the first array of floats;
- int64 indices: copied as int32, after a check of their range;
- FlashInfer's names of arguments.

A call with NumPy or CuPy arrays that need no conversion goes to the function at once.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbflow_kernels import op_registry
from nbflow_kernels.arrays import check_writable, is_cuda
from nbflow_kernels.errors import UsageError
from nbflow_kernels.exchange.array_exchange import dtype_name, exported, is_array, native
from nbflow_kernels.formats.float8 import FLOAT8_NAMES

_F16, _F32 = np.dtype(np.float16), np.dtype(np.float32)
_U8, _I32 = np.dtype(np.uint8), np.dtype(np.int32)
_HALF = ("float16", "bfloat16")

_ARRAYS: set[type] = {np.ndarray}
"""Types of native arrays seen so far."""
_PLAIN: set[type] = {int, float, bool, str, bytes, type(None), np.float32, np.int32}
"""Types that are neither arrays nor hold any, seen so far."""

_PAIR = 2
"""Elements of a tuple that may be arrays: keys and values."""

_ATTENTION = ("attention", "kv_cache", "masks")
"""Families whose kernels read float16 and, as `kv_format`, bfloat16."""
_FLOAT32_ROWS = {
    "append_paged_kv_cache": ("append_key", "append_value"),
    "append_paged_mla_kv_cache": ("append_ckv", "append_kpe"),
    "nvfp4_quantize_append_paged_kv_cache": ("append_key", "append_value"),
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": ("append_key", "append_value"),
    "rope_quantize_fp8_append_paged_kv_cache": ("q_rope", "k_rope", "q_nope", "k_nope", "v"),
    "merge_state": ("v_a", "v_b"),
    "merge_state_in_place": ("v", "v_other"),
    "merge_states": ("v",),
}
_FLOAT8_ARGUMENTS = {
    "kv_format": ("k", "v", "paged_kv_cache"),
    "out_format": ("out",),
    "quantize_dtype": (
        "q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out", "paged_kv_cache",
    ),
}  # fmt: skip
"""Names of formats to the arguments that tell them if they are float8 of other libraries."""
_QUERIES = ("q", "q_nope", "q_pe", "out", "sinks")
"""Arguments of attention that are widened from bfloat16; their kernels read float16."""
_INDICES = re.compile(
    r"(ids|indices|indptr|positions?|lens?|offsets|inverse|rows|sz|num|mapping)(_arr|_buf)*$"
)
"""Names of int32 arguments, by their ends."""
_NAMES = {"layernorm": {"gemma": "weight", "beta": "bias"}}
"""FlashInfer's names of arguments to those of here; `input` is the first one of norms etc."""


@dataclass(frozen=True)
class _Rules:
    """Conversions of one public function."""

    function: Callable[..., Any]
    parameters: tuple[str, ...]
    family: str
    op: str
    renamed: dict[str, str]
    writes: frozenset[str]

    @functools.cached_property
    def takes_float16(self) -> frozenset[str]:
        """Parameters whose arrays of float16 are not widened."""
        return frozenset(name for name in self.parameters if not self.widens(name, "float16"))

    def take_all(self, named: Iterable[tuple[str, Any]]) -> bool:
        """Return True if the function takes all values as they are."""
        for name, value in named:
            kind = type(value)
            if kind in _ARRAYS:
                dtype = value.dtype
                half = dtype is _F16 and name in self.takes_float16
                if dtype is not _F32 and dtype is not _I32 and dtype is not _U8 and not half:
                    return False
            elif kind is tuple and len(value) <= _PAIR:
                if not self.take_all([(name, v) for v in value]):
                    return False
            elif kind not in _PLAIN:
                return False
        return True

    @property
    def format_name(self) -> str:
        """Return the parameter that names the format of float8 arguments, if there is one."""
        return next((name for name in _FLOAT8_ARGUMENTS if name in self.parameters), "")

    def widens(self, name: str, half: str) -> bool:
        """Return True if an argument of float16 or bfloat16 becomes a float32 copy."""
        if name == "state" or name in op_registry.READS_HALF.get(self.op, ()):
            return False  # a state rounded after every step would drift
        if self.family not in _ATTENTION:
            return self.family != "quantizers" or half == "bfloat16"
        if name in _FLOAT32_ROWS.get(self.op, ()):
            return True
        return half == "bfloat16" and (
            name in _QUERIES or (name in ("k", "v") and "BlockSparse" in self.op)
        )

    @property
    def rounds_results(self) -> bool:
        """Return True if results take the half-precision type of the arguments."""
        return self.op not in op_registry.FLOAT32_RESULTS and self.family != "quantizers"


@dataclass
class _Taken:
    """An argument: the caller's object, its memory, and what the function gets."""

    given: Any
    memory: Any
    used: Any
    dtype: str = ""
    written: bool = False


@dataclass
class _Call:
    """Conversions of one call."""

    rules: _Rules
    arguments: dict[str, Any]
    like: Any = None
    rounds_like: Any = None
    rounds_to: str = ""
    wide_integers: bool = False
    float8: list[str] = field(default_factory=list)
    """Formats of arguments whose float8 NumPy lacks."""
    float8_result: str = ""
    """Format of uint8 results that are float8 codes."""
    taken: dict[int, _Taken] = field(default_factory=dict)

    def take(self, name: str, value: Any) -> Any:
        """Return what the function gets for an argument."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, tuple | list):
            return self._take_sequence(name, value)
        if is_array(value):
            return self._take_array(name, value)
        if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
            return str(value).rpartition(".")[2]
        _PLAIN.add(type(value))
        return value

    def _take_sequence(self, name: str, values: Any) -> Any:
        if not any(is_array(v) for v in values[:2]):  # e.g. lists of ids
            return values
        used = [self.take(name, v) for v in values]
        if all(a is b for a, b in zip(values, used, strict=True)):
            return values
        made = type(values)(*used) if hasattr(values, "_fields") else type(values)(used)
        self.taken[id(made)] = _Taken(values, values, made)
        return made

    def _take_array(self, name: str, value: Any) -> Any:
        found = next((t for t in self.taken.values() if t.given is value), None)
        if found is not None:
            found.written |= name in self.rules.writes
            return found.used
        memory = native(name, value)
        if memory is value:
            _ARRAYS.add(type(value))
        elif dtype_name(value) in FLOAT8_NAMES and name in _FLOAT8_ARGUMENTS.get(
            self.rules.format_name, ()
        ):
            self.float8.append(FLOAT8_NAMES[dtype_name(value)])
        dtype = "bfloat16" if dtype_name(value) == "bfloat16" else dtype_name(memory)
        if self.like is None:
            self.like = value
        if name in self.rules.writes:
            check_writable(name, memory)
        used = memory
        widened = dtype in _HALF and self.rules.widens(name, dtype)
        if self.rounds_like is None and (widened or dtype == "float32"):
            self.rounds_like = value
            self.rounds_to = dtype if widened and self.arguments.get("o_dtype") is None else ""
        if widened:
            used = _widened(name, memory, dtype)
        elif dtype == "int64" and _is_index(name):
            used = _int32(name, memory)
            self.wide_integers |= name == "indices"
        else:
            dtype = ""
        written = name in self.rules.writes
        self.taken[id(used)] = _Taken(value, memory, used, dtype, written)
        return used

    def add_format(self, name: str, given: Any, more: dict[str, Any]) -> str:
        """Pass the format of float8 arguments on; return that of float8 results, if any."""
        found = list(dict.fromkeys((self.float8 or [""])[:: max(len(self.float8) - 1, 1)]))
        if given is None and self.float8:
            more[name] = given = "/".join(found)
        if name != "quantize_dtype":
            return ""
        chosen = FLOAT8_NAMES.get(given, given) or "f8_e4m3"
        if self.float8 and set(self.float8) != {chosen}:
            raise UsageError(
                f"quantize_dtype must be that of the outputs and caches, {', '.join(found)}, got "
                f"{given}"
            )
        return str(chosen)

    def write_back(self) -> None:
        """Round what was changed in place to the caller's memory."""
        for taken in self.taken.values():
            if taken.written and taken.used is not taken.memory:
                taken.memory[...] = _rounded(taken.used, taken.dtype)

    def give(self, result: Any) -> Any:
        """Return the caller's form of a result."""
        if id(result) in self.taken:
            return self.taken[id(result)].given
        if type(result) in (tuple, list):
            first = result[:1] if self.rules.family == "attention" else result
            rest = result[len(first) :]
            return type(result)(
                [*(self.give(v) for v in first), *(self._give_array(v, False) for v in rest)]
            )
        return self._give_array(result, self.rules.rounds_results)

    def _give_array(self, result: Any, rounds: bool) -> Any:
        if id(result) in self.taken:
            return self.taken[id(result)].given
        if not is_array(result):
            return result
        if self.float8_result and self.like is not None and result.dtype == np.uint8:
            return exported(result, self.like, float8=self.float8_result)
        half = self.rounds_to if rounds and result.dtype == _F32 else ""
        if half:
            result = _rounded(result, half)
        elif self.wide_integers and result.dtype == _I32:
            result = result.astype(np.int64)
        like = self.rounds_like if half else self.like
        if self.rules.op in op_registry.INT64_RESULTS and type(like).__module__ == "torch":
            result = result.astype(np.int64) if result.dtype == _I32 else result
        return result if like is None else exported(result, like, bfloat16=half == "bfloat16")


def public(name: str, value: Any) -> Any:
    """Return a public function, or a class with its methods, that takes arrays of any library."""
    families = {n: f for f, names in op_registry.FAMILIES.items() for n in names}
    family = families.get(name, "quantizers" if name == "quantize" else "")
    if not family:
        return value
    if not inspect.isclass(value):
        return _wrapped(value, family, name)
    for base in value.__mro__:
        if base.__module__.startswith("nbflow_kernels."):
            for member, function in list(vars(base).items()):
                if inspect.isfunction(function) and (member == "__init__" or member[0] != "_"):
                    setattr(base, member, _wrapped(function, family, name))
                elif isinstance(function, functools.partialmethod):  # holds the bare function
                    whole = _wrapped(function.func, family, name)
                    more = functools.partialmethod(whole, *function.args, **function.keywords)
                    setattr(base, member, more)
    for alias, member in op_registry.METHOD_ALIASES.items():
        if family == "attention" and hasattr(value, member):
            setattr(value, alias, inspect.getattr_static(value, member))
    return value


def _wrapped(function: Callable[..., Any], family: str, op: str) -> Callable[..., Any]:
    """Return a function that converts arguments and results where they need it."""
    if hasattr(function, "__wrapped__"):
        return function
    parameters = tuple(inspect.signature(function).parameters)
    renamed = dict(_NAMES.get(op, {}))
    if family in ("norm", "activation") and "x" in parameters:
        renamed["input"] = "x"
    writes = frozenset({"out", "lse", *op_registry.IN_PLACE.get(op, ())})
    rules = _Rules(function, parameters, family, op, renamed, writes)

    @functools.wraps(function)
    def op_call(*args: Any, **kwargs: Any) -> Any:
        if rules.take_all(zip(parameters, args, strict=False)) and (
            not kwargs or (rules.take_all(kwargs.items()) and renamed.keys().isdisjoint(kwargs))
        ):
            return function(*args, **kwargs)
        return _converted_call(rules, args, kwargs)

    return op_call


def _converted_call(rules: _Rules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert the arguments of a call, call the function, and convert the results."""
    if rules.renamed:
        kwargs = {rules.renamed.get(name, name): value for name, value in kwargs.items()}
    given = dict(zip(rules.parameters, args, strict=False)) | kwargs
    arguments = {name: given[name] for name in rules.parameters if name in given}
    if len(arguments) < len(args) + len(kwargs):
        return rules.function(*args, **kwargs)  # raises: an argument too many, unknown or twice
    call = _Call(rules, arguments)
    used = {name: call.take(name, value) for name, value in arguments.items()}
    first = [used[name] for name in rules.parameters[: len(args)]]
    more = {name: used[name] for name in kwargs}
    if name := rules.format_name:
        call.float8_result = call.add_format(name, used.get(name), more)
    result = rules.function(*first, **more)
    call.write_back()
    return call.give(result)


@functools.cache
def _is_index(name: str) -> bool:
    """Return True if an argument holds indices, positions or lengths, by its name."""
    return _INDICES.search(name) is not None


def _widened(name: str, memory: Any, half: str) -> Any:
    """Return a C-contiguous float32 copy of float16 numbers, or of bits of bfloat16."""
    if is_cuda(memory) and half == "float16":
        return memory.astype(np.float32)
    if half == "float16":
        return memory.astype(np.float32, order="C")
    if is_cuda(memory):
        raise UsageError(
            f"{name}: bfloat16 on a CUDA device is taken for weights and caches only; pass "
            "float32 or float16"
        )
    wide = np.left_shift(memory, 16, dtype=np.uint32, order="C")
    return wide.view(np.float32)


def _rounded(array: Any, dtype: str) -> Any:
    """Return an array in the dtype of the caller's: float32 rounded, int32 widened."""
    if dtype == "bfloat16":
        from nbflow_kernels.cpu.interpreter.memory import f32_to_bf16

        return f32_to_bf16(array)
    with np.errstate(over="ignore"):  # float16: larger numbers are infinite, as in every library
        return array.astype(dtype)


def _int32(name: str, array: Any) -> Any:
    """Return indices as int32; their range is not checked on a device, which would wait."""
    if not is_cuda(array) and array.size:
        low, high = int(array.min()), int(array.max())
        if low < -(2**31) or high >= 2**31:
            raise UsageError(f"{name} must fit in 32 bits, got {low if low < 0 else high}")
    return array.astype(np.int32)
