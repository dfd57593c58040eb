"""Detection of CUDA devices, driver and packages; never raises.

No GPU package is imported, except the finder of NVIDIA's libraries (`cuda.pathfinder`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from nbflow_kernels.cuda import bundle
from nbflow_kernels.errors import install_command

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_NO_DEVICE = 100
_OF_CUINIT = {
    34: "it is the stub that comes with the toolkit; let the driver's own be found before it",
    802: "the fabric manager, which devices with NVSwitch need, does not run",
    803: "the driver's library and its kernel module differ in version; restart the machine",
}
"""Explanations of some errors of ``cuInit``."""


@dataclass(frozen=True)
class Detected:
    """Result of the detection.

    Attributes
    ----------
    driver_version : tuple of int or None
        The newest CUDA version the driver runs, (major, minor); None without a driver.
    n_devices : int
        CUDA devices.
    cupy : bool
        True if CuPy is installed.
    compilers : bool
        True if the bindings of NVRTC, which compiles CUDA C++, are installed.
    nvvm : bool
        True if numba-cuda and libNVVM, which compile Numba kernels, are installed.
    reason : str
        Reason why kernels cannot run, and the remedy; empty if they can.
    """

    driver_version: tuple[int, int] | None
    n_devices: int
    cupy: bool
    compilers: bool
    nvvm: bool
    reason: str

    @property
    def usable(self) -> bool:
        """Return whether kernels can run on a CUDA device of this machine."""
        return not self.reason

    @property
    def limitation(self) -> str:
        """Return what does not work although kernels run, and the remedy; empty if all does."""
        if self.reason or self.nvvm:
            return ""
        return no_nvvm()


def detect(library: str = LIBRARY) -> Detected:
    """Find the CUDA driver, its devices and the packages that kernels need.

    Parameters
    ----------
    library : str
        File name of the driver's library.

    Returns
    -------
    Detected

    Examples
    --------
    >>> from nbflow_kernels.cuda import detect
    >>> detect("no-such-library.so").reason
    'no CUDA driver found (no-such-library.so does not load)'
    """
    cupy, compilers = _installed("cupy"), _installed("cuda.bindings")
    version, n_devices, reason = None, 0, ""
    try:
        driver = ctypes.CDLL(library)
        version, n_devices, reason = _ask(driver)
    except (OSError, AttributeError):
        reason = f"no CUDA driver found ({library} does not load)"
    runs = compilers or bundle.is_named()  # a bundle may have all kernels
    if not reason and not (cupy and runs):
        missing = " and ".join(n for n, ok in (("CuPy", cupy), ("cuda-bindings", runs)) if not ok)
        reason = f"{missing} missing: {install_command(extra(version))}"
    if not reason and version is not None:
        reason = _too_new(version)
    nvvm = _installed("numba_cuda") and bool(find_nvvm())
    return Detected(version, n_devices, cupy, compilers, nvvm, reason)


@cache
def find_nvvm() -> str:
    """Load libNVVM, as the compiler of Numba kernels does, and return its path; empty without."""
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        return str(pathfinder.load_nvidia_dynamic_lib("nvvm").abs_path)
    except Exception:  # the finder is missing, or says in its own error that the library is
        return ""


def no_nvvm() -> str:
    """Return what does not work without numba-cuda and libNVVM, and the remedy."""
    major = installed_version("cuda-bindings").split(".")[0]
    chosen = extra((int(major), 0) if major.isdigit() else None)
    missing = "libNVVM" if _installed("numba_cuda") else "numba-cuda"
    return (
        f"{missing} is missing, so Numba kernels cannot be compiled: quantizing on the device, "
        f"user formats and attention variants; {install_command(chosen)}, or use a bundle of "
        "compiled kernels (NBFLOW_CUDA_BUNDLE)"
    )


def extra(driver_version: tuple[int, int] | None) -> str:
    """Return the extra that fits a driver: ``cuda12`` or ``cuda13``."""
    return "cuda13" if driver_version is not None and driver_version[0] >= 13 else "cuda12"


def _ask(driver: ctypes.CDLL) -> tuple[tuple[int, int] | None, int, str]:
    """Return the driver's version, its number of devices and the reason it is unusable, if any."""
    code = driver.cuInit(0)
    number, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    version = (number.value // 1000, number.value % 1000 // 10)
    if code == 0:
        driver.cuDeviceGetCount(ctypes.byref(count))
    elif code != _NO_DEVICE:
        meaning = f" ({_OF_CUINIT[code]})" if code in _OF_CUINIT else ""
        return version, 0, f"cuInit of the CUDA driver failed with error {code}{meaning}"
    if count.value == 0:
        return version, 0, "the CUDA driver finds no CUDA device"
    if version[0] < 12:
        return version, count.value, f"the driver runs CUDA {version[0]}.{version[1]}; update it"
    return version, count.value, ""


def _too_new(driver: tuple[int, int]) -> str:
    """Return a message about packages for a newer CUDA than the driver's; empty if there are none.

    Older packages are fine: drivers are backward compatible.
    """
    packages = {
        name: int(name.removeprefix("cupy-cuda").removesuffix("x"))
        for name in ("cupy-cuda13x", "cupy-cuda14x")
        if installed_version(name)
    }
    bindings = installed_version("cuda-bindings")
    if bindings:
        packages["cuda-bindings"] = int(bindings.split(".")[0])
    wrong = [name for name, major in packages.items() if major > driver[0]]
    if not wrong:
        return ""
    return (
        f"{' and '.join(wrong)} need CUDA {max(packages[name] for name in wrong)}, the driver runs "
        f"CUDA {driver[0]}.{driver[1]}: pip uninstall {' '.join(wrong)}, then "
        f"{install_command(extra(driver))}; or update the driver"
    )


def installed_version(distribution: str) -> str:
    """Return a distribution's version; empty if it is not installed."""
    with contextlib.suppress(Exception):  # broken metadata counts as not installed
        return metadata.version(distribution)
    return ""


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
