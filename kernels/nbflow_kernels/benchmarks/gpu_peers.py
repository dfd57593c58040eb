"""Other libraries on the shapes of a benchmark's cases: PyTorch, Triton through it, and cuBLAS.

Products compare with bfloat16 and float16 weights, which are not quantized; attention with
`scaled_dot_product_attention` on float16 caches.  Only libraries that are installed are measured,
and one that fails is reported with the reason.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase

MAX_COPIES = 16
Seconds = float | str
"""Median seconds of a call, or the reason why there are none."""
Peer = Callable[[], Any]


def measure(
    case: OpCase, arguments: dict[str, Any], n_calls: int, repeats: int, l2_bytes: int
) -> dict[str, Seconds]:
    """Return the seconds of each installed library for the shapes of a case."""
    torch = _torch()
    found: dict[str, Seconds] = {}
    if torch is None:
        return found
    for name, make in torch_calls(torch, "cuda", case, arguments).items():
        try:
            calls = _copies(make, l2_bytes)
            found[name] = float(np.median(_seconds(torch, calls, n_calls, repeats)))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


@functools.cache
def _torch() -> Any:
    """Return PyTorch if it is installed and has a device."""
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        torch = importlib.import_module("torch")
        return torch if torch.cuda.is_available() else None
    except Exception:  # an installation that does not load
        return None


def torch_calls(
    torch: Any, device: str, case: OpCase, arguments: dict[str, Any]
) -> dict[str, Callable[[], tuple[Peer, int]]]:
    """Return functions by name; each returns a call with new inputs, and their bytes."""
    if case.op in ("matmul", "qmatmul"):
        T, K = arguments["x"].shape
        N = arguments["w"].shape[0]
        return {"torch.matmul bf16": lambda: _product(torch, device, T, N, K)}
    if case.op in ("single_decode_with_kv_cache", "single_prefill_with_kv_cache"):
        return {"torch SDPA f16": lambda: _attention(torch, device, case, arguments)}
    functions = {"rmsnorm": _rmsnorm, "silu_and_mul": _silu_and_mul}
    if case.op not in functions:
        return {}
    shape, function = arguments["x"].shape, functions[case.op]
    made: dict[str, Callable[[], tuple[Peer, int]]] = {
        "torch f32": lambda: _rows(torch, device, shape, function)
    }
    if importlib.util.find_spec("triton") is not None:
        compiled = functools.partial(_compiled, function)
        made["torch.compile (Triton) f32"] = lambda: _rows(torch, device, shape, compiled)
    return made


def _product(torch: Any, device: str, T: int, N: int, K: int) -> tuple[Peer, int]:
    x = torch.randn(T, K, device=device, dtype=torch.bfloat16)
    w = torch.randn(N, K, device=device, dtype=torch.bfloat16)
    out = torch.empty(T, N, device=device, dtype=torch.bfloat16)
    return lambda: torch.matmul(x, w.T, out=out), 2 * (T * K + N * K + T * N)


def _attention(
    torch: Any, device: str, case: OpCase, arguments: dict[str, Any]
) -> tuple[Peer, int]:
    shape, keys = arguments["q"].shape, arguments["k"].shape
    T, H, D = shape if len(shape) == 3 else (1, *shape)
    G, N = keys[:2] if arguments.get("kv_layout") == "HND" else keys[1::-1]
    q, k, v = (
        torch.randn(1, heads, n, D, device=device, dtype=torch.float16)
        for heads, n in ((H, T), (G, N), (G, N))
    )
    causal = bool(arguments.get("causal")) and T == N
    attend = torch.nn.functional.scaled_dot_product_attention
    options = {"is_causal": causal, "enable_gqa": G != H}
    return lambda: attend(q, k, v, **options), 2 * D * (2 * H * T + 2 * G * N)


def _rows(torch: Any, device: str, shape: tuple[int, ...], function: Any) -> tuple[Peer, int]:
    x = torch.randn(*shape, device=device)
    call = function(torch, x)
    return lambda: call(x), 8 * math.prod(shape)


def _rmsnorm(torch: Any, x: Any) -> Callable[[Any], Any]:
    weight = torch.ones(x.shape[-1], device=x.device)
    return lambda rows: torch.nn.functional.rms_norm(rows, rows.shape[-1:], weight, 1e-5)


def _silu_and_mul(torch: Any, x: Any) -> Callable[[Any], Any]:
    n = x.shape[-1] // 2
    return lambda rows: torch.nn.functional.silu(rows[..., :n]) * rows[..., n:]


def _compiled(function: Any, torch: Any, x: Any) -> Callable[[Any], Any]:
    compiled: Callable[[Any], Any] = torch.compile(function(torch, x), dynamic=False)
    return compiled


def _copies(make: Callable[[], tuple[Peer, int]], l2_bytes: int) -> list[Peer]:
    """Return calls with inputs of their own, enough of them to exceed the L2 cache."""
    first, n_bytes = make()
    n = max(1, min(MAX_COPIES, math.ceil(2 * l2_bytes / max(n_bytes, 1))))
    return [first, *(make()[0] for _ in range(n - 1))]


def _seconds(torch: Any, calls: list[Peer], n_calls: int, repeats: int) -> list[float]:
    """Time calls that were captured into one graph, after a run of each."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(n_calls):
            calls[i % len(calls)]()
    samples = []
    with torch.cuda.stream(stream):
        for _ in range(repeats + 1):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            samples.append(float(first.elapsed_time(last)) * 1e-3 / n_calls)
    return samples[1:]
