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
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import matplotlib
import numpy as np
import pandas as pd
from measure_formats import machine_name

import nbflow
import nbflow_kernels as nk
from nbflow import system
from nbflow.allocation import allocate
from nbflow.allocation.divergence import Probe
from nbflow.calibrate import collect, write_inputs
from nbflow_experiments.compare.bootstrap import paired
from nbflow_experiments.report.figure import _DPI, _STYLE, COLOURS, GREY

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "quantization.md"
WORK = Path("runs/pareto")
RUNS = Path("runs")
MODEL = "tiny_python"
CANDIDATES = ["q2", "q3_b64t1", "q3h", "q4_b64t1", "q4", "q5", "q6"]
BUDGETS = [3.0, 3.25, 3.5, 3.75, 4.0, 4.25, 4.5]
WINDOW = 256
FORMAT_PAIRS = (  # a, b: how much more the second loses, with the encoders best and gptq
    ("q3h", "q3"), ("q3h", "q3h_b256t1"), ("q3h", "q4_b256t1"), ("q3h", "q4_b64t1"),
    ("q3h_b256t1", "q3_b64t1"), ("q3h_b256t1", "q3_k"), ("q4_b64t1", "q4_k"),
)  # fmt: skip
ENCODER_PAIRS = ("plain", "best, inputs", "hqq", "hadamard", "outliers", "awq", "gptq", "awq+gptq")
MIXED_PAIRS = (("kld-4.00", "q3h, gptq"), ("kld-3.50", "q3h, best"), ("kld-3.50", "q3, best"))


def prepare(arguments: argparse.Namespace) -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    nk.load_formats(ROOT / "experiments" / "pareto_formats.py")
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


# ---- the report -----------------------------------------------------------------------------


def label(row: Any) -> str:
    """Return what was measured at a point: format, encoder, and whether inputs were known."""
    if str(row.weights).endswith(".toml"):
        return Path(str(row.weights)).stem
    known = row.importance != "" and row.encoder == "best"
    return f"{row.weights}, {row.encoder}" + (", inputs" if known else "")


def read(runs: Path) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
    """Return the points of both sweeps by label, and the divergence of each of their tokens."""
    rows, tokens = [], {}
    for folder in sorted(runs.glob("pareto*/points/*")):
        if not (folder / "result.json").is_file():
            continue
        result = json.loads((folder / "result.json").read_text())
        if result["status"] != "done":
            continue
        config = json.loads((folder / "config.json").read_text())["config"]
        values = {r["metric"]: r["value"] for r in result["readings"]}
        errors = {f"{r['metric']}_stderr": r["stderr"] for r in result["readings"]}
        row = {**config, **errors, **values, "bits_per_weight": result["bits_per_weight"]}
        row["label"] = label(pd.Series(row))
        with h5py.File(folder / "arrays.h5") as file:
            tokens[row["label"]] = file["kld_nats"][:]
        rows.append(row)
    return pd.DataFrame(rows).set_index("label").sort_values("bits_per_weight"), tokens


def ratio(tokens: dict[str, np.ndarray], a: str, b: str) -> dict[str, Any] | None:
    """Return how many times the divergence of a b's is, windows drawn in pairs."""
    if a not in tokens or b not in tokens:
        return None
    found = paired(tokens[a], tokens[b], WINDOW - 1, np.log)
    low, high = float(np.exp(found.low)), float(np.exp(found.high))
    change = float(np.exp(found.change))
    return {"a": a, "b": b, "ratio": change, "low": low, "high": high}


def report(arguments: argparse.Namespace) -> None:
    table, tokens = read(RUNS)
    pairs = [(f"{a}, {e}", f"{b}, {e}") for e in ("best", "gptq") for a, b in FORMAT_PAIRS]
    pairs += [(f"{f}, best", f"{f}, {e}") for f in ("q3h", "q3") for e in ENCODER_PAIRS]
    pairs += [(f"{f}, gptq", f"{f}, hadamard+gptq") for f in ("q3h", "q3")]
    pairs += [("q3h, best", "q3, gptq"), *MIXED_PAIRS]
    comparisons = [found for a, b in pairs if (found := ratio(tokens, a, b)) is not None]
    columns = ["bits_per_weight", "kld_mean_nats", "kld_mean_nats_stderr", "perplexity"]
    columns += ["top1_agreement_share"]
    out = ROOT / "results" / "pareto" / arguments.machine
    out.mkdir(parents=True, exist_ok=True)
    facts = {
        "commands": ["python tools/pareto.py prepare", "nbflow sweep experiments/pareto.toml",
                     "nbflow sweep experiments/pareto_mixed.toml", "python tools/pareto.py report"],
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "packages": system.package_versions(),
        "points": json.loads(table[columns].to_json(orient="index")),
        "comparisons": comparisons,
    }  # fmt: skip
    (out / "pareto.json").write_text(json.dumps(facts, indent=1) + "\n")
    for name in ("pareto", "pareto_mixed"):
        for file in ("sweep.json", "provenance.json"):
            shutil.copyfile(RUNS / name / file, out / f"{name}.{file}")
    table.to_csv(out / "points.csv")
    for policy in sorted(WORK.glob("*-?.??.toml")):
        shutil.copyfile(policy, out / policy.name)
    draw(table, out / "pareto")
    write_page(table, comparisons)
    print(table[columns].to_string())
    for c in comparisons:
        print(f"{c['b']} / {c['a']}: {c['ratio']:.3f} [{c['low']:.3f}, {c['high']:.3f}]")


def write_page(table: pd.DataFrame, comparisons: list[dict[str, Any]]) -> None:
    """Write the tables of docs/quantization.md."""
    tables = {"formats": _formats(table), "comparisons": _comparisons(comparisons)}
    text = PAGE.read_text("utf-8")
    for name, lines in tables.items():
        mark = f"<!-- {name}: written by tools/pareto.py -->\n"
        rows = "\n".join(lines) + "\n"
        text = re.sub(re.escape(mark) + r"(\|.*\n)*", lambda _, new=mark + rows: new, text)
    PAGE.write_text(text, "utf-8")


def _formats(table: pd.DataFrame) -> list[str]:
    """Return a row for each number of bits: KLD with the encoders best and gptq, and mixed."""
    rows = ["| matrices in | bits/weight | KLD, best | KLD, gptq | perplexity, gptq |"]
    rows.append("|---|---:|---:|---:|---:|")
    kld = table.kld_mean_nats
    found = {}
    for name, row in table.iterrows():
        words = str(name).split(", ")
        if words[1:] == ["gptq"]:
            best = f"{kld[words[0] + ', best']:.4f}" if f"{words[0]}, best" in kld else "-"
            found[row.bits_per_weight, f"`{words[0]}`"] = (best, row)
        elif str(name).startswith("kld-") and row.bits_per_weight > 3:
            found[row.bits_per_weight, "chosen one by one"] = ("-", row)
    for (bits, name), (best, row) in sorted(found.items()):
        numbers = f"{best} | {row.kld_mean_nats:.4f} | {row.perplexity:.3f} |"
        rows.append(f"| {name} | {bits:g} | {numbers}")
    return rows


def _comparisons(comparisons: list[dict[str, Any]]) -> list[str]:
    rows = ["| a | b | KLD of b / KLD of a | 95 % interval |", "|---|---|---:|---|"]
    for c in comparisons:
        rows.append(
            f"| {c['a']} | {c['b']} | {c['ratio']:.2f} | {c['low']:.2f} to {c['high']:.2f} |"
        )
    return rows


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw stored bits against divergence."""
    plt.rcParams.update(_STYLE)
    figure, axes = plt.subplots(figsize=(7.2, 4.6))
    singles = table[~table.index.str.startswith(("kld-", "error-"))]
    for encoder, colour, marker in (("best", COLOURS[0], "o"), ("gptq", COLOURS[1], "s")):
        rows = singles[singles.index.str.endswith(f", {encoder}")]
        axes.scatter(rows.bits_per_weight, rows.kld_mean_nats, c=colour, marker=marker,
                     label=f"one format, encoder {encoder}", zorder=3)  # fmt: skip
        for name, row in rows.iterrows():
            axes.annotate(str(name).split(",")[0].removesuffix("t1"),
                          (row.bits_per_weight, row.kld_mean_nats), (4, 3), color=colour,
                          textcoords="offset points", fontsize=6.5)  # fmt: skip
    mixed = table[table.index.str.startswith("kld-")].sort_values("bits_per_weight")
    axes.plot(mixed.bits_per_weight, mixed.kld_mean_nats, color=COLOURS[2], marker="^",
              label="chosen matrix by matrix, gptq", zorder=4)  # fmt: skip
    others = [n for n in singles.index if n.startswith(("q3h, ", "q3, "))]
    others = [n for n in others if not n.endswith((", best", ", gptq"))]
    rows = singles.loc[others]
    axes.scatter(rows.bits_per_weight, rows.kld_mean_nats, c=GREY, marker="x", s=18, zorder=2,
                 label="other encoders of q3h and q3")  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlabel("stored bits per weight")
    axes.set_ylabel("KL divergence from float32, nats per token")
    axes.legend(loc="lower left")
    figure.tight_layout()
    for kind, meta in (("png", {"Software": None}), ("svg", {"Date": None})):
        figure.savefig(path.with_suffix(f".{kind}"), dpi=_DPI, metadata=meta)


def main() -> None:
    parser = argparse.ArgumentParser(description="bits against divergence on the bundled model")
    parser.add_argument("what", choices=("prepare", "report"))
    parser.add_argument("--tokens", type=int, default=16384, help="tokens that inputs are read of")
    parser.add_argument("--machine", default=machine_name(), help="folder in results/pareto")
    arguments = parser.parse_args()
    (prepare if arguments.what == "prepare" else report)(arguments)


if __name__ == "__main__":
    main()
