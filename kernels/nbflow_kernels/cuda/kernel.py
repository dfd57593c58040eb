"""`Kernel`: a CUDA kernel with declared parameters, compiled at its first launch."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbflow_kernels.compilation.jit_cache import is_as_imported, source_digest
from nbflow_kernels.cuda import cache, numba_cuda, nvrtc
from nbflow_kernels.cuda.cache import Compiled
from nbflow_kernels.cuda.devices import Dim3, KernelDevice, Launch, device_of
from nbflow_kernels.cuda.errors import CompileError
from nbflow_kernels.cuda.kernel_parameters import Parameters
from nbflow_kernels.errors import UsageError

_ROOT = Path(__file__).parent.parent
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_NOT_A_NAME = re.compile(r"\W+")

Compile = Callable[[str, str], Compiled]
"""``(arch, output)`` to the code, from the disk cache or the compiler.

PTX instead of a cubin if the compiler does not know the architecture; see `nvrtc.target`."""


class _Here(threading.local):
    """State of a host thread."""

    launches: list[Callable[[], None]] | None = None
    """Launches that `record_launches` collects."""


_here = _Here()


@contextmanager
def record_launches() -> Iterator[list[Callable[[], None]]]:
    """Collect this thread's launches, to repeat them without checking and packing arguments.

    A collected launch holds addresses, not arrays: its arrays must live as long as it is used.

    Examples
    --------
    >>> from nbflow_kernels.cuda import record_launches
    >>> with record_launches() as launches:
    ...     pass  # ops on device arrays
    >>> for launch in launches:
    ...     launch()
    """
    launches: list[Callable[[], None]] = []
    outer, _here.launches = _here.launches, launches
    try:
        yield launches
    finally:
        _here.launches = outer


class Kernel:
    """A CUDA kernel with declared parameters; made by `cpp_kernel` and `numba_kernel`.

    Parameters
    ----------
    name : str
        Its name in error messages.
    parameters : str
        The declaration, e.g. ``"f32* x, f32*? weight, i32 n, f32 eps"``.
    compile : callable
        Returns its code for a target.
    """

    def __init__(self, name: str, parameters: str, compile: Compile) -> None:
        self.name = name
        self.parameters = Parameters(parameters)
        self.compile = compile
        self._loaded: dict[Any, Launch] = {}
        self._lock = threading.Lock()

    def __call__(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: tuple[Any, ...],
        shared: int = 0,
    ) -> None:
        """Launch the kernel on the device of its first array, without waiting for it.

        Parameters
        ----------
        grid, block : int or tuple of up to three int
            Thread blocks, and threads in each.
        args : tuple
            One for each declared parameter.
        shared : int
            Bytes of dynamic shared memory.

        Raises
        ------
        TypeError
            If an argument does not fit its parameter.
        UsageError
            If the device has not that much shared memory, or an axis of the grid is too long.
        CompileError
            At the first launch, if the compiler refuses the source.
        """
        device = device_of(args[self.parameters.first_pointer])
        packed = self.parameters.pack(self.name, args)
        launch = self._loaded.get(device.key) or self.prepare(device)
        if shared > device.max_shared_bytes:
            raise UsageError(
                f"{self.name} needs {shared} bytes of shared memory, the device has "
                f"{device.max_shared_bytes}"
            )
        dims = _dims(self.name, grid, block)
        launch(*dims, packed, shared)
        if _here.launches is not None:
            _here.launches.append(functools.partial(launch, *dims, packed, shared))

    def prepare(self, device: KernelDevice) -> Launch:
        """Compile and load the kernel for a device, which a stream that captures does not allow."""
        with self._lock:
            if device.key not in self._loaded:
                code, entry = self.compile(device.arch, device.output)
                self._loaded[device.key] = device.load(code, entry)
            return self._loaded[device.key]

    def __repr__(self) -> str:
        return f"Kernel({self.name}: {self.parameters.text})"


@functools.lru_cache(4096)
def _dims(
    kernel: str, grid: int | tuple[int, ...], block: int | tuple[int, ...]
) -> tuple[Dim3, Dim3]:
    return _dim3(kernel, grid), _dim3(kernel, block)


def _dim3(kernel: str, size: int | tuple[int, ...]) -> Dim3:
    x, y, z = (size, 1, 1) if isinstance(size, int) else (*size, 1, 1)[:3]
    if not (0 < x < 2**31 and 0 < y < 65536 and 0 < z < 65536):
        raise UsageError(
            f"{kernel}: axes of a grid must be in 1..2147483647, 1..65535, 1..65535, got {size}"
        )
    return int(x), int(y), int(z)


def cpp_kernel(
    module_file: str,
    file: str,
    entry: str,
    parameters: str,
    *,
    defines: Mapping[str, str | int] | None = None,
    options: Sequence[str] = (),
    arch_specific: bool = False,
) -> Kernel:
    """Return a kernel of CUDA C++.

    Parameters
    ----------
    module_file : str
        ``__file__`` of the module in the source's folder.
    file : str
        Name of the source.
    entry : str
        An ``extern "C"`` name, or a template instance such as ``scale<float, 4>``.
    parameters : str
        The declaration, e.g. ``"f32* x, f32*? weight, i32 n, f32 eps"``.
    defines : mapping, optional
        Macros.
    options : sequence of str
        Further options of NVRTC.
    arch_specific : bool
        True if the source uses instructions of one architecture only (``wgmma``,
        ``setmaxnreg``): a device of compute capability 9.0 gets code for ``sm_90a``, where the
        source finds ``__CUDA_ARCH_FEAT_SM90_ALL`` defined.  Other devices get the code that the
        source has for all; see `specific_arch`.
    """
    path = Path(module_file).parent / file
    words = [f"-D{name}={value}" for name, value in (defines or {}).items()]
    words += [*options, f"-I{path.parent}", f"-I{_ROOT}"]

    def compile(arch: str, output: str) -> Compiled:
        arch = specific_arch(arch) if arch_specific else arch
        target, kind = nvrtc.target(arch, output)
        flags = [w for w in words if not w.startswith("-I")]
        wanted = entry if "<" in entry else ""  # an extern "C" file holds all its kernels
        sources = _sources(path)

        def key(*compilers: str) -> str:
            made_for = (target, kind) if compilers else (arch, output)
            return cache.digest(*sources, *made_for, *compilers, wanted, *flags)

        def build() -> Compiled:
            try:
                return nvrtc.compile_source(
                    path.read_text(), str(path), target, kind, entry, words
                )  # fmt: skip
            except CompileError as e:
                raise CompileError(f"{entry} of {file} for {target}: {e}") from e

        name = _NOT_A_NAME.sub("_", path.stem)
        code, found = cache.cached(name, kind, key, lambda: (nvrtc.version(),), build)
        return code, found if wanted else entry

    return Kernel(entry, parameters, compile)


def specific_arch(arch: str) -> str:
    """Return the target with the instructions that only this architecture has.

    Examples
    --------
    >>> from nbflow_kernels.cuda.kernel import specific_arch
    >>> specific_arch("sm_90"), specific_arch("sm_80")
    ('sm_90a', 'sm_80')
    """
    return "sm_90a" if arch == "sm_90" else arch


def _sources(path: Path) -> list[bytes]:
    """Return a source and everything of this package that it includes, in order."""
    seen: dict[Path, bytes] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen[file] = file.read_bytes()
        for name in _INCLUDE.findall(seen[file].decode()):
            places = (file.parent / name, path.parent / name, _ROOT / name)
            found = next((p.resolve() for p in places if p.is_file()), None)
            if found is not None:
                waiting.append(found)
    return [seen[file] for file in sorted(seen, key=lambda f: (f != path, f))]


def _compilers() -> tuple[str, ...]:
    """Return the versions of the compilers of a Numba kernel."""
    return numba_cuda.version(), nvrtc.version()


def numba_kernel(
    parameters: str,
    *,
    key: str | None = "",
    fastmath: bool = False,
    fuse: bool = True,
    name: str = "",
) -> Callable[[Callable[..., Any]], Kernel]:
    """Return the decorator that makes a kernel of a Python function.

    Parameters
    ----------
    parameters : str
        The declaration, by the function's parameters' names.
    key : str or None
        Key of kernels made by one factory (the values the function closes over); None keeps
        the kernel off the disk.
    fastmath : bool
        Approximate division, roots and functions, and no denormal numbers.
    fuse : bool
        Allow contraction of a product and a sum into one FMA, rounded once.
    name : str
        The kernel's name, by default the function's.

    Raises
    ------
    TypeError
        If the names differ, or a function that closes over something has no `key`.
    """
    declared = Parameters(parameters)

    def decorate(function: Callable[..., Any]) -> Kernel:
        code = function.__code__
        own = code.co_varnames[: code.co_argcount]
        if own != tuple(p.name for p in declared.all):
            raise TypeError(f"{function.__name__} takes {own}, declared are '{parameters}'")
        if code.co_freevars and key == "":
            raise TypeError(f"{function.__name__} closes over {code.co_freevars}; it needs a key")
        entry = _NOT_A_NAME.sub("_", name or function.__name__).lstrip("_") or "kernel"

        def compile(arch: str, output: str) -> Compiled:
            target, kind = nvrtc.target(arch, output)

            def build() -> Compiled:
                made = numba_cuda.compile_function(
                    function, declared.all, target, kind, entry, fastmath, fuse
                )
                return made, entry

            path = Path(code.co_filename)
            if key is None or not is_as_imported(path):
                return build()
            own, options = (function.__qualname__, parameters, key), str((fastmath, fuse))

            def digest(*compilers: str) -> str:
                made_for = (target, kind) if compilers else (arch, output)
                return cache.digest(source_digest(path), *own, *made_for, *compilers, options)

            return cache.cached(entry, kind, digest, _compilers, build)

        return Kernel(entry, parameters, compile)

    return decorate
