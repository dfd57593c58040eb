"""Pytest plugin that runs FlashInfer's tests on a CPU: its package is nbflow_kernels.

`flashinfer` and all its modules are proxies whose public names are those of nbflow_kernels; names
that a checkout defines without a GPU (constants, declarations) come from there; a call of another
name raises `NoCounterpart`.  Devices "cuda" of PyTorch are its CPU.  Calls are passed on without
arguments that only choose a path on a GPU (`DROPPED`).  `flashinfer_tests.py` loads it.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import nbflow_kernels as nk

CHECKOUT = Path(os.environ["FLASHINFER_CHECKOUT"])
DROPPED = (
    "backend", "enable_pdl", "generator", "jit_kwargs", "reuse_module", "use_cuda_graph",
    "use_tensor_cores",
)  # fmt: skip
"""Arguments that choose a path on a GPU, or the state of a GPU's random numbers."""
METHODS = (
    "begin_forward", "forward", "forward_return_lse", "plan", "run", "run_return_lse",
)  # fmt: skip


class NoCounterpart(Exception):
    """A name of FlashInfer that nbflow_kernels does not have."""


# ---- PyTorch: "cuda" is the CPU -----------------------------------------------------------------


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


class CudaIsCpu(TorchFunctionMode):
    """Replace devices in the arguments of PyTorch's functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of PyTorch on the CPU."""
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if func is torch.Tensor.is_cuda.__get__:
            return True
        kwargs = {n: _on_cpu(v) for n, v in (kwargs or {}).items() if n != "pin_memory"}
        args = tuple(map(_on_cpu, args))
        if name == "to" and len(args) > 1 and type(args[1]) is int:
            args = (args[0], "cpu", *args[2:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Nothing:
    """Stream, event or context of a device."""

    cuda_stream, device = 0, torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *args: object) -> bool:
        return False

    def record(self, *args: Any) -> None:
        """Do nothing, like the methods that follow."""

    synchronize = wait_stream = wait_event = record


class _CudaGraph:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NoCounterpart("torch.cuda.CUDAGraph needs a CUDA device")


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        """Return a generator of the CPU."""
        return super().__new__(cls, "cpu")


def _patch_torch() -> None:
    hopper = types.SimpleNamespace(
        multi_processor_count=132, total_memory=24 << 30, major=9, minor=0, name="CPU",
        shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
        max_threads_per_multi_processor=2048,
    )  # fmt: skip
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "synchronize": None,
        "get_device_capability": (9, 0), "empty_cache": None, "manual_seed": None,
        "manual_seed_all": None, "get_device_name": "CPU", "get_device_properties": hopper,
        "mem_get_info": (20 << 30, 24 << 30), "set_device": None,
        "is_current_stream_capturing": False,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(torch.cuda, name, functools.partial(lambda value, *a, **k: value, value))
    for name in ("Stream", "stream", "device", "Event", "current_stream"):
        setattr(torch.cuda, name, _Nothing)
    torch.cuda.CUDAGraph = torch.cuda.graph = _CudaGraph  # type: ignore[misc, assignment]
    torch.Generator = _Generator  # type: ignore[misc]
    CudaIsCpu().__enter__()


# ---- the package --------------------------------------------------------------------------------


def _kept(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in DROPPED}


def _function(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **_kept(kwargs))

    return call


def _with_sinks(declaration: Any) -> bool:
    """Return True for the variant that FlashInfer publishes as `attention_sink_decl`: `sinks=`."""
    published = _from_checkout("jit.attention.variants").attention_sink_decl.values()
    if declaration in published:
        return True
    raise NoCounterpart("jit_args: C++ source of a variant; `variant=` takes Python functions")


def _class(name: str, wrapped: type) -> type:
    """Return a subclass whose methods drop arguments; `jit_args` may only ask for sinks."""

    def __init__(self: Any, *args: Any, jit_args: Any = None, **kwargs: Any) -> None:
        self.takes_sinks = jit_args is not None and _with_sinks(jit_args[-1])
        wrapped.__init__(self, *args, **_kept(kwargs))  # type: ignore[misc]

    def method(function: Callable[..., Any], runs: bool) -> Callable[..., Any]:
        arrays = 3 if "Ragged" in name else 2

        @functools.wraps(function)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs = _kept(kwargs)
            if runs and self.takes_sinks:  # FlashInfer passes the sinks and sm_scale by position
                sinks, sm_scale = args[arrays:]
                kwargs |= {"sinks": sinks, "q_scale": sm_scale / self.current.sm_scale}
                args = args[:arrays]
            return function(self, *args, **kwargs)

        return call

    members: dict[str, Any] = {"__init__": __init__}
    for member in METHODS:
        if hasattr(wrapped, member):
            members[member] = method(getattr(wrapped, member), "run" in member)
    return type(name, (wrapped,), members)


@functools.cache
def _counterpart(name: str) -> Any:
    """Return the public name of nbflow_kernels, or None."""
    if name not in nk.__all__:
        return None
    found = getattr(nk, name)
    if inspect.isclass(found) and hasattr(found, "run"):
        return _class(name, found)
    return _function(found) if callable(found) and not inspect.isclass(found) else found


class Absent:
    """A name without a counterpart: it may be imported and compared, and a use raises."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `NoCounterpart`, like the methods that follow."""
        raise NoCounterpart(self.path)

    __getitem__ = __iter__ = __call__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[()]:
        """Allow subclasses."""
        return ()

    def __or__(self, other: Any) -> Any:
        """Allow annotations."""
        return other


@functools.cache
def _from_checkout(module: str) -> types.ModuleType:
    """Import one file of the checkout, which must not need a GPU, under another name."""
    path = CHECKOUT / "flashinfer" / (module.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location(f"checkout_{module.replace('.', '_')}", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def _decode_nvfp4(
    packed: Any, scales: Any, global_scale: Any = None, sf_vec_size: int = 16,
    ufp8_type: int = 1, is_sf_swizzled_layout: bool = True,
) -> Any:  # fmt: skip
    """Decode rows of E2M1 codes and E4M3 scales, as tests do for what they expect."""
    if is_sf_swizzled_layout or ufp8_type != 1:
        raise NoCounterpart("swizzled scales of NVFP4 tensors")
    level = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    pairs = torch.stack([level.repeat(16), level.repeat_interleave(16)], -1)  # of each byte
    values = torch.nn.functional.embedding(packed.int(), pairs).flatten(-2)
    factors = scales.view(torch.float8_e4m3fn).float()
    factors = factors if global_scale is None else factors * global_scale
    values.unflatten(-1, (-1, sf_vec_size)).mul_(factors[..., None])
    return values


class _TopKTieBreak(enum.IntEnum):
    NONE, SMALL, LARGE = 0, 1, 2


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


_DTYPE_NAMES = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2", torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip
_NO_SPECS = {
    f"gen_{name}_module": _constant([])
    for name in (
        "batch_decode", "batch_prefill", "batch_prefill_attention_sink", "single_decode",
        "single_prefill",
    )
}  # fmt: skip
_DEVICE = {  # what tests ask before they choose a path
    "get_compute_capability": _constant((9, 0)), "is_sm90a_supported": _constant(True),
    "has_flashinfer_jit_cache": _constant(True), "device_support_pdl": _constant(True),
    "determine_attention_backend": _constant("fa2"), "is_fa3_backend_supported": _constant(True),
    "get_device_sm_count": _constant(132), "is_cvt_rs_supported": _constant(False),
    "version_at_least": _constant(False), "determine_gemm_backend": _constant("sm80"),
    "BackendSupportedError": type("BackendSupportedError", (Exception,), {}), "_cache_buf": {},
    **{
        f"is_sm{name}_supported": _constant(False)
        for name in ("100a", "12x", "110a", "120a", "121a", "100f")
    },
}  # fmt: skip
NAMES: dict[str, dict[str, Any]] = {
    "flashinfer": {"__version__": "0", "__path__": [], "TopKTieBreak": _TopKTieBreak},
    "flashinfer.utils": _DEVICE,
    "flashinfer.jit": {
        "MissingJITCacheError": type("MissingJITCacheError", (Exception,), {}),
        "build_jit_specs": _constant(None),
    },
    "flashinfer.jit.attention": _NO_SPECS,
    "flashinfer.jit.utils": {"filename_safe_dtype_map": _DTYPE_NAMES},
    "flashinfer.topk": {"can_implement_filtered_topk": _constant(True)},
    "flashinfer.cutile.cutile_common": {"is_cuda_tile_available": _constant(False)},
    "flashinfer.moe_ep": {"available_backends": _constant([])},
    "flashinfer.fp4_quantization": {"e2m1_and_ufp8sf_scale_to_float": _decode_nvfp4},
}
"""Modules without ops: facts about the device, types, and helpers of tests."""
FROM_CHECKOUT = {
    "jit.attention.variants": "jit.attention.variants",
    "quantization.nvfp4_quantization_utils": "quantization.nvfp4_quantization_utils",
    "trace": "trace.template",
}
"""Modules whose other names are of a file of the checkout: declarations, options, comparisons."""


class Proxy(types.ModuleType):
    """A module of FlashInfer."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in NAMES.get(self.__name__, {}):
            return NAMES[self.__name__][name]
        found = _counterpart(name)
        if found is not None:
            return found
        inner = self.__name__.partition(".")[2]
        if inner in FROM_CHECKOUT:
            return getattr(_from_checkout(FROM_CHECKOUT[inner]), name)
        path = CHECKOUT.joinpath("flashinfer", *inner.split("."), name)
        if path.is_dir() or path.with_suffix(".py").exists():
            return importlib.import_module(f"{self.__name__}.{name}")
        return _DEVICE.get(name) or Absent(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import `flashinfer` and its modules as proxies."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return a specification for FlashInfer's names only."""
        if name.partition(".")[0] == "flashinfer":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        """Return the proxy."""
        return Proxy(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the proxy as it is."""
        module.__path__ = []


sys.meta_path.insert(0, Finder())
_patch_torch()
