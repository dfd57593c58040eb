"""Faster inlining of functions with ``inline="always"`` in Numba and numba-cuda.

Numba copies the IR of an inlined function block by block, and with each block the function's scope,
which lists all its variables.  For nested functions that is quadratic: six tenths of the time to
compile a decoder for CUDA.  Here all blocks of a copy share one copy of their scope, as the
originals share one.
"""

from __future__ import annotations

import copy
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

_patched: set[str] = set()


def share_scopes(module: ModuleType) -> None:
    """Make the inliner in `module` copy a function's scope once.

    Parameters
    ----------
    module : module
        ``numba.core.inline_closurecall`` or ``numba.cuda.core.inline_closurecall``.  Left as it is
        if it has another inliner than expected: a later version may not need this.
    """
    worker = getattr(module, "InlineWorker", None)
    if module.__name__ in _patched or worker is None or getattr(module, "copy", None) is not copy:
        return
    _patched.add(module.__name__)
    inline_ir = worker.inline_ir
    running = threading.local()

    def deepcopy(value: Any, memo: dict[int, Any] | None = None) -> Any:
        memos = getattr(running, "memos", None)
        if memo is None and memos and hasattr(value, "scope"):  # a block
            memo = memos[-1].setdefault(id(value.scope), {})
        return copy.deepcopy(value, memo)

    def sharing(self: Any, *args: Any, **options: Any) -> Any:
        running.memos = [*getattr(running, "memos", []), {}]
        try:
            return inline_ir(self, *args, **options)
        finally:
            running.memos = running.memos[:-1]

    module.copy = SimpleNamespace(copy=copy.copy, deepcopy=deepcopy)  # type: ignore[attr-defined]
    worker.inline_ir = sharing
