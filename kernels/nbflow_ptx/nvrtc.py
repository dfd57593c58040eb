"""CUDA C++ to PTX or cubin with NVRTC, on a computer without a GPU or a driver.

NVRTC comes with the packages ``numba-cuda[cu12]`` and ``[cu13]`` install (and with CuPy's
toolkit extra); it needs no driver as long as it is called directly, as here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from nbflow_ptx.errors import MissingToolError, PtxError

_INSTALL = "pip install -e '.[cuda-test]' (or numba-cuda[cu12])"
_FOLDERS = (
    "cuda_runtime/include", "cuda_nvcc/include", "cuda_cccl/include", "cu13/include",
    "cu13/include/cccl",
)  # fmt: skip


class CompileError(PtxError):
    """NVRTC refused the source; the message is its log."""


@dataclass
class Compiled:
    """Result of NVRTC: the code, the mangled name of each name expression, and the log."""

    code: bytes
    names: dict[str, str] = field(default_factory=dict)
    log: str = ""

    @property
    def text(self) -> str:
        """The code as text (of PTX)."""
        return self.code.rstrip(b"\0").decode()


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as e:
        raise MissingToolError(f"compiling CUDA C++ needs NVRTC: {_INSTALL}") from e
    return nvrtc


def available() -> bool:
    """Return whether NVRTC can be called here."""
    try:
        _call(_nvrtc().nvrtcVersion())
    except Exception:
        return False
    return True


@cache
def include_folders() -> tuple[str, ...]:
    """Return the folders of the CUDA headers that are installed."""
    try:
        import nvidia
    except ImportError:
        roots: list[Path] = []
    else:
        roots = [Path(p) for p in nvidia.__path__]
    found = [root / f for root in roots for f in _FOLDERS]
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    found += [home, home / "cccl"]
    return tuple(str(p) for p in found if p.is_dir())


def compile_source(
    source: str,
    arch: str = "sm_80",
    *,
    output: str = "ptx",
    options: Sequence[str] = (),
    name_expressions: Sequence[str] = (),
    file_name: str = "kernel.cu",
) -> Compiled:
    """Compile CUDA C++.

    Parameters
    ----------
    source : str
        The text; kernels are found by their names if they are ``extern "C"``.
    arch : str
        ``sm_80``, ``sm_90``, ...
    output : str
        ``ptx`` or ``cubin``.
    options : sequence of str
        Further options of NVRTC.  ``-std=c++17``, ``-lineinfo`` and the headers' folders are given.
    name_expressions : sequence of str
        C++ names (template instances, say) to keep and to look up.
    file_name : str
        What reports call the source.

    Returns
    -------
    Compiled

    Raises
    ------
    CompileError
        With the compiler's log.
    MissingToolError
        If NVRTC is not installed.
    """
    nvrtc = _nvrtc()
    program = _call(nvrtc.nvrtcCreateProgram(source.encode(), file_name.encode(), 0, [], []))
    try:
        for name in name_expressions:
            _call(nvrtc.nvrtcAddNameExpression(program, name.encode()))
        target = arch if output == "cubin" else arch.replace("sm_", "compute_")
        words = [f"-arch={target}", "-default-device", "-lineinfo"]
        if not any(o.startswith(("-std", "--std")) for o in options):
            words.append("-std=c++17")
        words += [*(f"-I{f}" for f in include_folders()), *options]
        status = nvrtc.nvrtcCompileProgram(program, len(words), [w.encode() for w in words])[0]
        log = _buffer(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        text = log.rstrip(b"\0 \n").decode("utf-8", "replace")
        if int(status) != 0:
            raise CompileError(text or str(status))
        names = {
            n: _call(nvrtc.nvrtcGetLoweredName(program, n.encode())).decode()
            for n in name_expressions
        }
        if output == "cubin":
            code = _buffer(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        else:
            code = _buffer(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        return Compiled(code, names, text)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _call(answer: tuple[Any, ...]) -> Any:
    """Return the results of a call of the bindings, whose first value is the status."""
    if int(answer[0]) != 0:
        raise PtxError(f"NVRTC: {answer[0]}")
    return answer[1] if len(answer) == 2 else answer[1:]


def _buffer(size: Any, fill: Any, program: Any) -> bytes:
    n = int(_call(size(program)))
    # written to in place: never one of Python's shared bytes objects, which are shorter than 2
    data = bytes(max(n, 2))
    _call(fill(program, data))
    return data[:n]
