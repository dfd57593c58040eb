#!/usr/bin/env python3
"""Find the constants of trellis-coded formats again, and compare them with those in use.

    python tools/measure/trellis_constants.py FOLDER --bits 2,3,4            # levels
    python tools/measure/trellis_constants.py FOLDER --bits 2,3,4 --matrices 400

Levels: Lloyd's iteration on N(0, 1) weights (quantize, then move each level to the mean of the
weights that chose it), averaged over the last half of the rounds, made antisymmetric and rounded
with the largest at 127.  Matrices: log2 of the errors with random matrices MIXING, summed over the
numbers of bits, and the rank of the one in use among them; it was the best of 400.

Appends a row for each number of bits, or for the matrices, to FOLDER/rows.jsonl.  Loads do not
matter.  98,304 weights take about a second for each round and number of bits on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from published_rows import append, conditions

from nbflow_kernels.formats import trellis_code as code
from nbflow_kernels.quantizers.search.trellis import search
from nbflow_kernels.quantizers.trellis_formats import NORMAL

COLUMNS = 4096
N_LEVELS = 1 << code.INDEX_BITS


def main() -> None:
    """Measure levels or matrices and append their rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bits", default="2,3,4")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--matrices", type=int, default=0, help="random matrices to compare")
    parser.add_argument("--weights", type=int, default=98304)
    arguments = parser.parse_args()
    bits = [int(word) for word in arguments.bits.split(",")]
    n_rows = max(1, arguments.weights // COLUMNS)
    facts = conditions() | {"weights": n_rows * COLUMNS}
    if arguments.matrices:
        rows = [compare_matrices(bits, arguments.matrices, n_rows)]
    else:
        rows = [compare_levels(k, arguments.rounds, n_rows) for k in bits]
    for row in rows:
        print(row, flush=True)
    append(arguments.folder / "rows.jsonl", facts, rows)


def compare_levels(bits: int, rounds: int, n_rows: int) -> dict[str, Any]:
    """Return the wasted bits with the levels in use and with new ones, and their difference.

    The bits of scales, 1/16, are not counted.
    """
    used = code.levels(bits).astype(np.float64) - code.ZERO
    found = lloyd(bits, rounds, n_rows)
    test = np.random.default_rng(1)  # not the weights of the iteration
    x = test.standard_normal((n_rows, COLUMNS), np.float32)
    wasted = [bits + rms_bits(x, v, code.MIXING, bits) for v in (used, found)]
    return {
        "bits": bits, "rounds": rounds, "wasted_bits": round(wasted[0], 4),
        "wasted_bits_of_new_levels": round(wasted[1], 4),
        "mean_difference_of_levels": round(float(np.abs(used - found).mean()), 3),
    }  # fmt: skip


def compare_matrices(bits: Sequence[int], n: int, n_rows: int) -> dict[str, Any]:
    """Return the rank of the matrix in use among random ones."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n_rows, COLUMNS), np.float32)
    n_masks = (1 << code.OLDEST_BITS) - 1
    drawn = rng.integers(1, n_masks + 1, (n, code.INDEX_BITS)).tolist()
    used = {k: code.levels(k).astype(np.float64) - code.ZERO for k in bits}
    losses = [
        sum(rms_bits(x, used[k], mixing, k) for k in bits) for mixing in (code.MIXING, *drawn)
    ]
    return {
        "bits": list(bits), "matrices": n, "rank": int(np.searchsorted(np.sort(losses), losses[0])),
        "log2_error": round(losses[0], 4), "best": round(min(losses), 4),
        "median": round(float(np.median(losses)), 4),
    }  # fmt: skip


def lloyd(bits: int, rounds: int, n_rows: int) -> NDArray[np.float64]:
    """Return levels (128,), rounded, with the largest at 127."""
    rng = np.random.default_rng(0)
    levels = np.sort(rng.standard_normal((1 << 12, N_LEVELS)), axis=1).mean(axis=0)
    levels *= 3 / levels[-1]
    kept = []
    for _ in range(rounds):
        x = rng.standard_normal((n_rows, COLUMNS), np.float32)
        states, d = paths(x, levels / levels[-1] * 127, code.MIXING, bits)
        chosen = indices(code.MIXING)[states]
        counts = np.bincount(chosen.ravel(), minlength=N_LEVELS)
        sums = np.bincount(chosen.ravel(), (x / d).ravel(), minlength=N_LEVELS)
        levels = np.where(counts > 0, sums / np.maximum(counts, 1), levels)
        levels = (levels - levels[::-1]) / 2
        kept.append(levels / np.abs(levels).max())
    mean: NDArray[np.float64] = np.mean(kept[rounds // 2 :], axis=0)
    return np.rint(mean / np.abs(mean).max() * 127)


def rms_bits(
    x: NDArray[np.float32], levels: NDArray[np.float64], mixing: Sequence[int], bits: int
) -> float:
    """Return log2 of the root mean squared error of weights, relative to their own."""
    states, d = paths(x, levels, mixing, bits)
    error = np.square(levels[indices(mixing)[states]] * d - x).mean() / np.square(x).mean()
    return float(np.log2(error)) / 2


def paths(
    x: NDArray[np.float32], levels: NDArray[np.float64], mixing: Sequence[int], bits: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return states (rows, K), and the scale of each weight."""
    values = levels[indices(mixing)].astype(np.float32)
    ones, steps = np.ones((1, x.shape[1]), np.float32), np.array([NORMAL[bits]], np.float32)
    streams, d = search(x, ones, bits, steps, values)
    blocks = streams.reshape(-1, 32 * bits)
    states = code.states_of_stream(blocks, bits).reshape(x.shape)
    return states, np.repeat(d.view(np.float16).astype(np.float64), 256, axis=1)


def indices(mixing: Sequence[int]) -> NDArray[np.int64]:
    """Return the index of each state with this matrix."""
    state = np.arange(1 << code.STATE_BITS)
    oldest, newest = state & (1 << code.OLDEST_BITS) - 1, state >> code.STATE_BITS - code.INDEX_BITS
    flips = [
        sum(((n & mask).bit_count() & 1) << i for i, mask in enumerate(mixing))
        for n in range(1 << code.OLDEST_BITS)
    ]
    found: NDArray[np.int64] = newest ^ np.array(flips)[oldest]
    return found


if __name__ == "__main__":
    main()
