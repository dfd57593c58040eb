"""Compilation of CUDA C++ to PTX or cubin with NVRTC, without a device or driver."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from nbflow_kernels.cuda.errors import CompileError
from nbflow_kernels.errors import MissingExtraError, install_command

logger = logging.getLogger(__name__)

INSTALL = f"{install_command('cuda12')}, or cuda-test on a computer without a GPU"
_FOLDERS = (
    "cuda_runtime/include", "cuda_nvcc/include", "cuda_cccl/include", "cu13/include",
    "cu13/include/cccl",
)  # fmt: skip


@cache
def _nvrtc() -> Any:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as e:
        raise MissingExtraError(f"compiling CUDA C++ needs NVRTC: {INSTALL}") from e


@cache
def version() -> str:
    """Return the compiler's version, ``12.9``.

    Raises
    ------
    MissingExtraError
        If NVRTC is not installed.
    """
    try:
        major, minor = _call(_nvrtc().nvrtcVersion())
    except (RuntimeError, OSError) as e:  # the bindings are there, the library is not
        raise MissingExtraError(f"NVRTC does not load ({e}): {INSTALL}") from e
    return f"{major}.{minor}"


@cache
def supported_archs() -> tuple[int, ...]:
    """Return the architectures that the compiler knows, ascending, such as 90 for ``sm_90``."""
    version()
    return tuple(sorted(map(int, _call(_nvrtc().nvrtcGetSupportedArchs()))))


@cache
def target(arch: str, output: str) -> tuple[str, str]:
    """Return target and output for a device of an architecture.

    A device that is newer than the compiler gets PTX of the newest architecture before its own that
    the compiler knows; the driver translates it when it is loaded.  Without the compiler, or if
    all that it knows is newer, the arguments are returned.

    Parameters
    ----------
    arch : str
        ``sm_90``, also with the suffix ``a``.
    output : {"ptx", "cubin"}
        Output for a device that the compiler knows.
    """
    number = int(arch.removeprefix("sm_").rstrip("af"))
    try:
        known = supported_archs()
    except (MissingExtraError, CompileError):  # a bundle may have the kernel
        return arch, output
    if number in known or number < known[0]:
        return arch, output
    older = max(n for n in known if n < number)
    logger.warning(
        "NVRTC %s does not know sm_%d: kernels are compiled to PTX for compute_%d, which the "
        "driver translates; a newer NVRTC makes machine code",
        version(), number, older,
    )  # fmt: skip
    return f"sm_{older}", "ptx"


@cache
def header_folders() -> tuple[str, ...]:
    """Return the folders of the CUDA headers that are installed."""
    roots: list[Path] = []
    with contextlib.suppress(ImportError):  # the toolkit may be the system's
        roots = [Path(p) for p in importlib.import_module("nvidia").__path__]
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    found = [*(root / f for root in roots for f in _FOLDERS), home, home / "cccl"]
    return tuple(str(p) for p in found if p.is_dir())


def compile_source(
    source: str,
    file_name: str,
    arch: str,
    output: str,
    entry: str,
    options: Sequence[str],
) -> tuple[bytes, str]:
    """Compile CUDA C++ and return the code and the name of the kernel `entry` in it.

    Parameters
    ----------
    source, file_name : str
        The source text and its name in messages and profilers.
    arch : str
        ``sm_80``, ``sm_90``, ...
    output : {"ptx", "cubin"}
        What to return.
    entry : str
        An ``extern "C"`` name, or a template instance such as ``scale<float, 4>``.
    options : sequence of str
        Options of NVRTC in addition to the language, the target and the headers' folders.

    Raises
    ------
    CompileError
        With the compiler's log.
    MissingExtraError
        If NVRTC is not installed.
    """
    version()
    nvrtc = _nvrtc()
    program = _call(nvrtc.nvrtcCreateProgram(source.encode(), file_name.encode(), 0, [], []))
    try:
        template = "<" in entry
        if template:
            _call(nvrtc.nvrtcAddNameExpression(program, entry.encode()))
        target = arch if output == "cubin" else arch.replace("sm_", "compute_")
        words = [f"-arch={target}", "-std=c++17", "-default-device", "-lineinfo"]
        words += [*options, *(f"-I{folder}" for folder in header_folders())]
        status = nvrtc.nvrtcCompileProgram(program, len(words), [w.encode() for w in words])[0]
        if int(status) != 0:
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise CompileError(log.rstrip(b"\0 \n").decode("utf-8", "replace") or str(status))
        if template:
            entry = _call(nvrtc.nvrtcGetLoweredName(program, entry.encode())).decode()
        if output == "cubin":
            return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), entry
        return _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0"), entry
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _call(answer: tuple[Any, ...]) -> Any:
    """Return the results of a call of the bindings, whose first value is the status."""
    if int(answer[0]) != 0:
        raise CompileError(f"NVRTC: {answer[0]}")
    return answer[1] if len(answer) == 2 else answer[1:]


def _text(size: Any, fill: Any, program: Any) -> bytes:
    n = int(_call(size(program)))
    # written to in place: never one of Python's shared bytes objects, which are shorter than 2
    data = bytes(max(n, 2))
    _call(fill(program, data))
    return data[:n]
