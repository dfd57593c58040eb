"""What the sweeps over bits and encoders need, and what is made of them.

python tools/pareto.py prepare [--tokens N]     # writes runs/pareto
nbflow sweep experiments/pareto.toml
nbflow sweep experiments/pareto_mixed.toml
python tools/pareto.py report [--machine NAME]  # writes results/pareto/NAME

`prepare` splits the bundled model's held-out text, sums up what goes into its matrices on the first
half (`nbflow imatrix --full`), and chooses mixed formats there (`nbflow quantize
--bits-per-weight`).  `report` writes rows, differences with intervals, and the figure.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
from measure_formats import machine_name

import nbflow
from nbflow import system
from nbflow.allocation import allocate
from nbflow.allocation.divergence import Probe
from nbflow.calibrate import collect, write_inputs

ROOT = Path(__file__).resolve().parents[1]
WORK = Path("runs/pareto")
RUNS = Path("runs")
MODEL = "tiny_python"
CANDIDATES = ["q2", "q3_b64t1", "q3h", "q4_b64t1", "q4", "q5", "q6"]
BUDGETS = [3.0, 3.25, 3.5, 3.75, 4.0, 4.25, 4.5]
PAIRS = [  # what is compared at the same encoder: a, b
    ("q3h", "q3"), ("q3h", "q4_b256t1"), ("q3h", "q3h_b256t1"), ("q3h_b256t1", "q3_b64t1"),
    ("q3h_b256t1", "iq3_s"), ("q3h_b256t1", "q3_k"), ("q3h", "iq3_s"), ("q3h", "q3_k"),
    ("q3h", "iq4_xs"), ("q3h", "q4_b64t1"),
]  # fmt: skip
N_RESAMPLES = 4000
WINDOW = 256


def prepare(arguments: argparse.Namespace) -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    nbflow_kernels_formats()
    text = (Path(nbflow.__file__).parent / "models" / MODEL / "eval.txt").read_text("utf-8")
    middle = text.index("\n", len(text) // 2) + 1
    (WORK / "calibration.txt").write_text(text[:middle], "utf-8")
    (WORK / "evaluation.txt").write_text(text[middle:], "utf-8")
    inputs = WORK / "inputs.safetensors"
    with nbflow.load(MODEL, kv="f32") as model:
        assert model.tokenizer is not None
        ids = np.asarray(model.tokenizer.encode(text[:middle]))[: arguments.tokens]
        windows = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)
        write_inputs(inputs, collect(model, list(windows), full=True), force=True)
    common: dict[str, Any] = {"encoder": "gptq", "importance": inputs}
    probe = Probe(MODEL, WORK / "calibration.txt", n_tokens=2048, window=WINDOW)
    for kind in ("kld", "error"):
        asked = {"sensitivity": kind, "probe": probe}
        chosen = allocate(MODEL, BUDGETS, CANDIDATES, **asked, **common)
        for bits, found in zip(BUDGETS, chosen, strict=True):
            found.write(WORK / f"{kind}-{bits:.2f}.toml")
            print(kind, bits, found.n_bytes, found.budget_bytes, found.predicted)


def nbflow_kernels_formats() -> None:
    import nbflow_kernels as nk

    nk.load_formats(ROOT / "experiments" / "pareto_formats.py")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("prepare", "report"))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--machine", default=machine_name())
    prepare(parser.parse_args())
