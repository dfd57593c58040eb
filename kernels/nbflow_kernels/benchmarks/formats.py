"""Errors and speeds of weight formats, compared with the machine's read bandwidth.

    python -m nbflow_kernels.benchmarks.formats [FORMAT ...] [--plugins FILE] [--shape N K]
    [--threads N]
                                           [--repeats N] [--out FILE]

Per format: the relative root mean square error of both quantizers on N(0, 0.02) weights (2**20 of
them); 1e6 weights encoded and decoded per second; and the product of one row of activations with an
N x K matrix, for float32 and int8 activations.  Products are measured in rounds over all formats,
each after a pass of the read probe, so that the share of the read bandwidth and the comparison of
formats mean something on a busy machine too.  All times are medians.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from nbflow_kernels.benchmarks import ops
from nbflow_kernels.benchmarks.roofline import ReadProbe, read_bandwidth
from nbflow_kernels.cpu.parallel_for import get_num_threads, set_num_threads
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS, QuantTensor, dequantize
from nbflow_kernels.plugins import load_plugin
from nbflow_kernels.quantized_matmul import qmatmul
from nbflow_kernels.quantizers import quantize
from nbflow_kernels.testing.format_table import relative_rmse, sample

SHAPE = (11008, 4096)  # the widest matrix of Llama 2 7B
FIGURES = ("gb_per_s", "gweights_per_s", "share_of_read")
ENCODED_ROWS = 128  # of 4096 columns, for the speed of quantizers and decoder


def measure_errors(name: str, n_rows: int = 1024) -> dict[str, float]:
    """Return the relative errors of a format's quantizers on N(0, 0.02) weights.

    Examples
    --------
    >>> from nbflow_kernels.benchmarks.formats import measure_errors
    >>> {k: round(v, 3) for k, v in measure_errors("f16", 4).items()}
    {'error_reference': 0.0, 'error_search': 0.0}
    """
    x = sample(n_rows)
    return {f"error_{e}": relative_rmse(x, name, e) for e in ("reference", "search")}


def measure_speed(
    name: str, shape: tuple[int, int] = SHAPE, repeats: int = 15
) -> dict[str, float | None]:
    """Return the speeds of quantizers, decoder and one-row products of a format.

    Parameters
    ----------
    name : str
        A name in `nbflow_kernels.FORMATS`.
    shape : tuple of int
        N and K of the matrix that is multiplied.
    repeats : int
        Samples of each product.

    Returns
    -------
    dict
        ``quantize_reference_mweights_per_s``, ``quantize_search_...``, ``dequantize_...``; for
        ``f32`` and ``int8`` activations ``gemv_<kind>_gb_per_s`` (stored bytes),
        ``..._gweights_per_s`` and ``..._share_of_read`` (of the bandwidth measured between
        the samples); for these and ``bf16`` the ``product_<kind>_error``, see `product_errors`;
        None for formats without such product.  ``packed_bits_per_weight``.
    """
    return measure_quantizers(name) | measure_products([name], shape, repeats)[name]


def measure_quantizers(name: str) -> dict[str, float | None]:
    """Return the speed of a format's quantizers and decoder, as in `measure_speed`."""
    x = sample(ENCODED_ROWS * 4).reshape(ENCODED_ROWS, -1)
    result: dict[str, float | None] = {}
    for quantizer in ("reference", "search"):
        seconds = _seconds(functools.partial(quantize, x, name, quantizer=quantizer), 3)
        result[f"quantize_{quantizer}_mweights_per_s"] = x.size / seconds / 1e6
    qt, out = quantize(x, name, quantizer="reference"), np.empty_like(x)
    result["dequantize_mweights_per_s"] = x.size / _seconds(lambda: dequantize(qt, out), 5) / 1e6
    return result


def measure_products(
    names: Sequence[str], shape: tuple[int, int] = SHAPE, repeats: int = 15
) -> dict[str, dict[str, float | None]]:
    """Return the errors and speeds of one-row products of several formats, as in `measure_speed`.

    In each of `repeats` rounds every product has its turn after a pass of the read probe, so that
    a machine that slows down slows all formats alike; the figures are medians over the rounds.
    """
    rows: dict[str, dict[str, float | None]] = {}
    products: list[tuple[str, str, QuantTensor]] = []
    for name in names:
        matrix, errors = _random_matrix(name, shape)
        packed = matrix.packed_nbytes
        bits = 8 * packed / (shape[0] * shape[1]) if packed else FORMATS[name].bits_per_weight
        rows[name] = errors | {"packed_bits_per_weight": bits}
        for kind in ("f32", "int8"):
            rows[name] |= dict.fromkeys(f"gemv_{kind}_{figure}" for figure in FIGURES)
            if kind == "f32" or matrix.format.takes_int8:
                products.append((name, kind, matrix))
    for (name, kind, _), figures in zip(products, _rounds(products, repeats), strict=True):
        rows[name] |= {f"gemv_{kind}_{key}": value for key, value in figures.items()}
    return rows


def _random_matrix(
    name: str, shape: tuple[int, int]
) -> tuple[QuantTensor, dict[str, float | None]]:
    """Return a matrix (512 random rows, repeated) and the errors of products with these rows."""
    N, K = shape
    w = sample(512 * K // 1024 + 1).ravel()[: 512 * K].reshape(512, K)
    some = quantize(w, name, quantizer="reference")
    matrix = QuantTensor(name, (N, K), some.data[np.arange(N) % 512])
    return matrix, product_errors(some)


def product_errors(w: QuantTensor) -> dict[str, float | None]:
    """Return how far products with a matrix are from exact ones, for each kind of activations.

    Returns
    -------
    dict
        ``product_<kind>_error``: for one row of N(0, 1) activations the root mean square of the
        error over that of the exact product, in float64, with the decoded weights.  None for int8
        with float weights, which there is not.
    """
    x = np.random.default_rng(2).standard_normal((1, w.shape[1]), dtype=np.float32)
    exact = x.astype(np.float64) @ dequantize(w).astype(np.float64).T
    result: dict[str, float | None] = {}
    for kind in ("f32", "bf16", "int8"):
        error = None
        if kind != "int8" or w.format.takes_int8:
            distance = qmatmul(x, w, activations=kind) - exact
            error = float(np.linalg.norm(distance) / np.linalg.norm(exact))
        result[f"product_{kind}_error"] = error
    return result


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the median duration of a call, after one that compiles."""
    call()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return median(taken)


def _rounds(
    products: Sequence[tuple[str, str, QuantTensor]], repeats: int
) -> list[dict[str, float | None]]:
    """Return the median speed of each product (name, activations, matrix) over the rounds."""
    probe = ReadProbe(2 * ops.last_level_cache_bytes())
    K = products[0][2].shape[1]
    activations = np.random.default_rng(1).standard_normal((1, K), dtype=np.float32)
    out = np.empty((1, products[0][2].shape[0]), np.float32)
    seconds = np.empty((len(products), repeats))
    shares = np.empty((len(products), repeats))
    for _, kind, matrix in products:
        qmatmul(activations, matrix, activations=kind, out=out)  # compiles
    for r in range(repeats):
        for p, (_, kind, matrix) in enumerate(products):
            n_bytes = matrix.packed_nbytes or matrix.nbytes
            bandwidth = probe.n_bytes / probe.seconds()  # also empties the cache
            started = time.perf_counter()
            qmatmul(activations, matrix, activations=kind, out=out)
            seconds[p, r] = time.perf_counter() - started
            shares[p, r] = n_bytes / seconds[p, r] / bandwidth
    result: list[dict[str, float | None]] = []
    for p, (_, _, matrix) in enumerate(products):
        taken, n_bytes = float(np.median(seconds[p])), matrix.packed_nbytes or matrix.nbytes
        result.append({
            "gb_per_s": n_bytes / taken / 1e9,
            "gweights_per_s": matrix.shape[0] * matrix.shape[1] / taken / 1e9,
            "share_of_read": float(np.median(shares[p])),
        })  # fmt: skip
    return result


def run(
    names: Sequence[str], shape: tuple[int, int] = SHAPE, repeats: int = 15
) -> dict[str, dict[str, Any]]:
    """Return errors and speeds by explicit name; report progress on stderr."""
    rows: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(FORMATS[name].name for name in names):
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows[name] = {
            "bits_per_weight": FORMATS[name].bits_per_weight,
            **measure_errors(name),
            **measure_quantizers(name),
        }
    print("products ...", file=sys.stderr, flush=True)
    for name, products in measure_products(list(rows), shape, repeats).items():
        rows[name] |= products
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run the measurement; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nbflow_kernels.benchmarks.formats", description=str(__doc__).split("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="FORMAT", help="default: all formats")
    parser.add_argument("--plugins", action="append", default=[], metavar="FILE")
    parser.add_argument("--shape", nargs=2, type=int, default=SHAPE, metavar=("N", "K"))
    parser.add_argument("--threads", type=int, default=1, help="threads (default: 1)")
    parser.add_argument("--repeats", type=int, default=15, help="samples (default: 15)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON to FILE")
    arguments = parser.parse_args(argv)
    try:
        for file in arguments.plugins:
            load_plugin(file)
        set_num_threads(arguments.threads)
        if min(arguments.shape) < 1 or arguments.repeats < 1:
            raise UsageError("--shape and --repeats must be at least 1")
        names = arguments.names or list(FORMATS)
        rows = run(names, (arguments.shape[0], arguments.shape[1]), arguments.repeats)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = {
        "threads": get_num_threads(),
        "shape": list(arguments.shape),
        "read_bandwidth_gb_per_s": read_bandwidth() / 1e9,
        "formats": rows,
    }
    text = json.dumps(report, indent=1) + "\n"
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
