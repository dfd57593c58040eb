"""User-defined attention variants: plain Python functions compiled into the attention kernel.

A variant is any object or class with some of the attributes of `AttentionVariant`.  On the CPU
Numba compiles each function into a loop over 64 scores or the numbers of a result, which the kernel
of built-in attention calls (`cpu/variants.py`); on a device into a kernel that takes one query
vector and one key at a time (`cuda/variants.py`).  Compiling takes a second per process: it is not
cached on disk, as changes of user functions cannot be detected.
`nbflow_kernels.attention.reference` calls the same functions from NumPy, for debugging.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow_kernels.arrays import is_cuda
from nbflow_kernels.errors import UsageError
from nbflow_kernels.plugins import Registry, find_object

HOOKS = {
    "logits_transform": ("params", "logit", "batch", "qo_idx", "kv_idx", "qo_head", "kv_head"),
    "logits_mask": ("params", "batch", "qo_idx", "kv_idx", "qo_head", "kv_head"),
    "output_transform": ("params", "output", "batch", "qo_idx", "qo_head"),
}
"""Functions of a variant and their parameters, after which `qo_pos` may follow."""
POSITION = "qo_pos"


@dataclass(frozen=True)
class AttentionVariant:
    """User-defined functions for attention scores, masks and outputs.

    `batch` is the index of the request, `qo_idx` of the query row in the request, `kv_idx` of the
    key; `qo_head` and `kv_head` are the heads.  `qo_idx` is not the position of the query: in a
    decode step it is 0.  A function whose last parameter is called `qo_pos` gets the position, the
    index of the key that belongs to the query.  Numba must be able to compile the functions
    (numbers, `math`, NumPy arrays).

    Raises
    ------
    UsageError
        On use, if a function has other parameters or cannot be compiled.

    Examples
    --------
    Sigmoid attention: the weight of a key does not depend on the other keys.

    >>> import math
    >>> import numpy as np
    >>> from nbflow_kernels import AttentionVariant, single_prefill_with_kv_cache
    >>> def sigmoid(params, logit, batch, qo_idx, kv_idx, qo_head, kv_head):
    ...     return 1.0 / (1.0 + math.exp(-(logit + params[0])))
    >>> variant = AttentionVariant(logits_transform=sigmoid, params=(0.0,), use_softmax=False)
    >>> q, kv = np.zeros((1, 1, 2), np.float32), np.ones((3, 1, 2), np.float32)
    >>> single_prefill_with_kv_cache(q, kv, kv, variant=variant)  # three weights of 1 / 2
    array([[[1.5, 1.5]]], dtype=float32)
    """

    logits_transform: Callable[..., Any] | None = None
    """``(params, logit, batch, qo_idx, kv_idx, qo_head, kv_head) -> float``: replaces the score
    `logit`, the dot product times `sm_scale`."""
    logits_mask: Callable[..., Any] | None = None
    """``(params, batch, qo_idx, kv_idx, qo_head, kv_head) -> bool``: True if the row sees the key;
    combines with `causal`, `window_left` and `custom_mask`."""
    output_transform: Callable[..., Any] | None = None
    """``(params, output, batch, qo_idx, qo_head) -> float``: applied to each element of the
    result."""
    params: tuple[Any, ...] = ()
    """Numbers and arrays for the functions: NumPy arrays, or arrays on the device of the call."""
    use_softmax: bool = True
    """Turn scores into weights by softmax; False uses the scores as weights."""

    @property
    def functions(self) -> tuple[Any, ...]:
        """Return what a kernel is compiled for: the functions, and `use_softmax`."""
        hooks = (self.logits_transform, self.logits_mask, self.output_transform)
        return *hooks, self.use_softmax


def read_variant(variant: Any) -> AttentionVariant:
    """Return the functions and parameters of any object or class, checked."""
    known = (*HOOKS, "params", "use_softmax")
    found = {name: _attribute(variant, name) for name in known if hasattr(variant, name)}
    if not found:
        raise UsageError(
            f"variant must have one of the attributes {', '.join(known)}, got {variant!r}"
        )
    for name, wanted in HOOKS.items():
        function = found.get(name)
        if function is None:
            continue
        if not inspect.isfunction(function):
            raise UsageError(f"variant.{name} must be a Python function, got {function!r}")
        parameters = tuple(inspect.signature(function).parameters)
        if parameters[len(wanted) :] not in ((), (POSITION,)) or len(parameters) < len(wanted):
            raise UsageError(
                f"variant.{name} must take ({', '.join(wanted)}), and {POSITION} after them if it "
                f"needs the position of the query, got ({', '.join(parameters)})"
            )
    params = tuple(found.get("params", ()))
    for i, value in enumerate(params):
        if not isinstance(value, int | float | np.number | np.ndarray) and not is_cuda(value):
            kind = type(value)
            raise UsageError(
                f"variant.params[{i}] must be a number, a NumPy array or an array on a CUDA "
                f"device, got {kind.__module__}.{kind.__qualname__}"
            )
    return AttentionVariant(**{**found, "params": params})


def _attribute(variant: Any, name: str) -> Any:
    """Return an attribute; functions unbound."""
    raw = inspect.getattr_static(variant, name)
    if isinstance(raw, staticmethod):
        return raw.__func__
    return raw if inspect.isfunction(raw) else getattr(variant, name)


def cannot_compile(error: Exception) -> UsageError:
    """Return the error for functions that Numba cannot compile."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return UsageError(
        "variant cannot be compiled; its functions may use numbers, math and NumPy arrays: "
        + " ".join(lines[:6])
    )


def with_position(name: str, function: Any, python: Any) -> Any:
    """Return a hook that takes `qo_pos` last: `function` itself, or a caller of it.

    `function` is the compiled form of `python`, whose signature counts, or `python` itself.
    """
    if len(inspect.signature(python).parameters) > len(HOOKS[name]) or python in _DEFAULTS:
        return function

    def transform(params, logit, batch, qo_idx, kv_idx, qo_head, kv_head, qo_pos):
        return function(params, logit, batch, qo_idx, kv_idx, qo_head, kv_head)

    def mask(params, batch, qo_idx, kv_idx, qo_head, kv_head, qo_pos):
        return function(params, batch, qo_idx, kv_idx, qo_head, kv_head)

    def output(params, x, batch, qo_idx, qo_head, qo_pos):
        return function(params, x, batch, qo_idx, qo_head)

    forms = {"logits_transform": transform, "logits_mask": mask, "output_transform": output}
    return forms[name]


ATTENTION: Registry[AttentionVariant] = Registry("attention variant", "nbflow.register_attention")
"""Variants of plugins, which models name in the field `attention`."""


def register_attention(name: str, variant: Any) -> Any:
    """Register an attention variant, for models that name it in the field `attention`.

    Parameters
    ----------
    name : str
        The name.
    variant : object
        An `AttentionVariant`, or any object or class with some of its attributes.

    Returns
    -------
    object
        `variant`.

    Raises
    ------
    UsageError
        If the name is taken, or a function has other parameters.
    """
    checked = read_variant(variant)
    functions = [f for f in checked.functions if inspect.isfunction(f)]
    ATTENTION.add(name, checked, functions[0] if functions else variant)
    return variant


def find_variant(name: str, where: str) -> AttentionVariant:
    """Return a variant by its registered name, or by FILE.py:NAME of an imported plugin."""
    if ":" in name:
        return read_variant(find_object(name, where))
    try:
        return ATTENTION[name]
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def no_transform(params, x, *where):
    """Default of `logits_transform` and `output_transform`."""
    return x


def no_mask(params, *where):
    """Default of `logits_mask`."""
    return True


_DEFAULTS = (no_transform, no_mask)
