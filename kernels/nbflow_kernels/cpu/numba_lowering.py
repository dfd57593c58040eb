"""Numba's lowering to LLVM IR without the bookkeeping of variables that own no memory.

Numba ends the life of every variable: it finds the place, releases what the variable refers to, and
overwrites it; each assignment first reads and releases the old value.  Numbers, vectors and tuples
of them refer to nothing, and nearly all variables of kernels are such; LLVM would remove these
instructions again.  Only arrays (and what contains them) need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numba.core import ir, lowering, typed_passes, types
from numba.core.compiler_machinery import register_pass
from numba.core.ir_utils import enforce_no_dels, enforce_no_phis
from numba.core.postproc import PostProcessor

_OWN_NOTHING = frozenset({
    types.Boolean, types.BooleanLiteral, types.Float, types.Integer, types.IntegerLiteral,
    types.NoneType, types.RangeType, types.RangeIteratorType,
})  # fmt: skip
"""Types of Numba whose values own no memory; others are looked up."""


class KernelLower(lowering.Lower):
    """Numba's lowering, which releases only what can own memory."""

    def incref(self, typ: Any, val: Any) -> None:
        """Count a reference to the memory that a value owns, if any."""
        if type(typ) not in _OWN_NOTHING:
            super().incref(typ, val)

    def decref(self, typ: Any, val: Any) -> None:
        """Release the memory that a value owns, if any."""
        if type(typ) not in _OWN_NOTHING:
            super().decref(typ, val)

    def storevar(self, value: Any, name: str, argidx: int | None = None) -> None:
        """Store a variable, without reading its old value if that owns no memory."""
        kind = self.typeof(name)
        if argidx is not None or self._disable_sroa_like_opt or owns_memory(self.context, kind):
            super().storevar(value, name, argidx)
        elif name in self._singly_assigned_vars:
            self._blk_local_varmap[name] = value
        else:
            self._alloca_var(name, kind)
            self.builder.store(value, self.varmap[name])


def owns_memory(target_context: Any, kind: Any) -> bool:
    """Return whether a value of a Numba type may own memory that is counted."""
    if type(kind) in _OWN_NOTHING:
        return False
    return bool(target_context.data_model_manager[kind].contains_nrt_meminfo())


@register_pass(mutates_CFG=True, analysis_only=False)
class KernelLowering(typed_passes.NativeLowering):
    """Numba's pass with `KernelLower`."""

    _name = "kernel_lowering"

    @property
    def lowering_class(self) -> Any:
        """Return the class that lowers a function."""
        return KernelLower


@register_pass(mutates_CFG=False, analysis_only=False)
class KernelLegalization(typed_passes.IRLegalization):
    """Numba's pass, which ends the lives of variables that may own memory and of no others."""

    _name = "kernel_legalization"

    def run_pass(self, state: Any) -> bool:
        """Insert the ends of lives."""
        if state.func_ir.is_generator:
            return bool(super().run_pass(state))
        enforce_no_phis(state.func_ir)
        enforce_no_dels(state.func_ir)
        owners = _owners(state.targetctx, state.typemap)
        keeps = state.flags.dbg_extend_lifetimes
        PostProcessor(state.func_ir).run(bool(owners), extend_lifetimes=keeps)
        for block in state.func_ir.blocks.values() if owners else ():
            block.body = [
                inst for inst in block.body if not isinstance(inst, ir.Del) or inst.value in owners
            ]
        return True


def _owners(target_context: Any, typemap: Mapping[str, Any]) -> frozenset[str]:
    known = {kind: owns_memory(target_context, kind) for kind in set(typemap.values())}
    return frozenset(name for name, kind in typemap.items() if known[kind])
