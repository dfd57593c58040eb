"""Numba's pipeline without the work that a kernel does not need.

Two of Numba's passes search for what kernels rarely contain: closures (functions and comprehensions
inside a function) and expressions of whole arrays.  Both first insert the ends of all variables'
lives, and later remove them.  Between passes Numba computes where variables live, though only the
code generator uses that, and generators and object mode, which kernels are not.  `KernelPasses`
leaves out what has nothing to do; the code that results is the same.
"""

from __future__ import annotations

import threading
from typing import Any

from numba.core import postproc, transforms, typed_passes, types, untyped_passes
from numba.core.compiler_machinery import register_pass
from numba.core.ir_utils import is_operator_or_getitem

from nbflow_kernels.cpu import numba_lowering

_CLOSURES = frozenset({
    "MAKE_FUNCTION", "BUILD_LIST", "LIST_APPEND", "LIST_EXTEND", "LOAD_CLOSURE",
})  # fmt: skip
"""Bytecode of the closures, comprehensions and array constants that Numba inlines."""
_INLINED_BY_NAME = frozenset({"stencil", "reduce"})
INLINED = "_nbflow_inlined"
"""Attribute of a typing context: whether an operator or an attribute of a type is inlined."""
numba_post_process = postproc.PostProcessor.run
"""Numba's method."""


class _Depth(threading.local):
    """Number of kernels that this thread is compiling, nested."""

    value = 0

    def __enter__(self) -> None:
        self.value += 1

    def __exit__(self, *_: object) -> None:
        self.value -= 1


compiling_kernel = _Depth()


@register_pass(mutates_CFG=True, analysis_only=False)
class KernelRewrites(typed_passes.NopythonRewrites):
    """Numba's rewrites of array expressions and string keys, where a function has any."""

    _name = "kernel_rewrites"

    def run_pass(self, state: Any) -> bool:
        """Rewrite the function if an operation returns an array or a string is an index."""
        results = (getattr(sig, "return_type", None) for sig in state.calltypes.values())
        if any(isinstance(kind, types.Array) for kind in results) or any(
            isinstance(kind, types.StringLiteral) for kind in state.typemap.values()
        ):
            return bool(super().run_pass(state))
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class KernelInlineOverloads(typed_passes.InlineOverloads):
    """Numba's inlining of overloads declared with ``inline=``, which skips what has none.

    Numba resolves each call, operator and attribute of a function again to find out.
    """

    _name = "kernel_inline_overloads"

    def _do_work_expr(
        self, state: Any, work_list: Any, block: Any, i: int, expr: Any, inline_worker: Any
    ) -> bool:
        if not self._may_inline(state, expr):
            return False
        found = super()._do_work_expr(state, work_list, block, i, expr, inline_worker)
        return bool(found)

    def _may_inline(self, state: Any, expr: Any) -> bool:
        if expr.op == "call":
            kind = state.typemap.get(expr.func.name)
            template = getattr(kind, "template", None)
            found = (template,) if template is not None else getattr(kind, "templates", ())
            return _is_inlined(found)
        if expr.op == "getattr":
            key = types.unliteral(state.typemap[expr.value.name]), expr.attr
        elif is_operator_or_getitem(expr):
            key = expr.op, expr.fn
        else:
            return False
        known = state.typingctx.__dict__.setdefault(INLINED, {})
        if key not in known:
            get = self._get_attr_info if expr.op == "getattr" else self._get_callable_info
            found = get(state, expr)
            known[key] = found is not None and _is_inlined(found[0])
        return bool(known[key])


def _is_inlined(found: Any) -> bool:
    """Return whether a template of a function may be inlined."""
    options = (getattr(template, "_inline", None) for template in found or ())
    return any(option is not None and not option.is_never_inline for option in options)


_REPLACED = {
    typed_passes.InlineOverloads: KernelInlineOverloads,
    typed_passes.NopythonRewrites: KernelRewrites,
    typed_passes.IRLegalization: numba_lowering.KernelLegalization,
    typed_passes.NativeLowering: numba_lowering.KernelLowering,
}


def kernel_passes(passes: list[Any], bytecode: Any) -> list[Any]:
    """Return the passes of a pipeline that a function with this bytecode needs."""
    made = []
    for kind, description in passes:
        if kind is untyped_passes.InlineClosureLikes and not _has_closures(bytecode):
            continue
        made.append((_REPLACED.get(kind, kind), description))
    return made


def _has_closures(bytecode: Any) -> bool:
    return not _INLINED_BY_NAME.isdisjoint(bytecode.co_names) or any(
        inst.opname in _CLOSURES for inst in bytecode.table.values()
    )


def shorten_post_processing() -> None:
    """Compute the lives of a kernel's variables only where they are used."""
    postproc.PostProcessor.run = _post_process  # type: ignore[method-assign]


def _post_process(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    function = self.func_ir
    if not compiling_kernel.value or function.is_generator:
        numba_post_process(self, emit_dels, extend_lifetimes)
        return
    function.blocks = transforms.canonicalize_cfg(function.blocks)
    function.variable_lifetime = postproc.VariableLifetime(function.blocks)
    function.generator_info = None
    if emit_dels:
        self._insert_var_dels(extend_lifetimes=extend_lifetimes)
