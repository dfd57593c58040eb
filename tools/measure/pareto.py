"""Prepare and report the Pareto sweeps over formats and quantizers.

    python tools/measure/pareto.py prepare [--tokens N]     # writes runs/pareto
    nbflow sweep experiments/sweeps/pareto.toml
    nbflow sweep experiments/sweeps/pareto_mixed.toml
    python tools/measure/pareto.py report [--machine NAME]  # writes results/pareto/NAME

`prepare` splits the bundled model's held-out text, collects second moments of the matmul inputs on
the first half (`nbflow imatrix --full`), and chooses mixed formats there (`nbflow quantize
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
from formats import machine_name
from publish_sweep import relative

import nbflow
import nbflow_kernels as nk
from nbflow.calibration import collect_stats, write_stats
from nbflow.calibration.allocation import allocate
from nbflow.calibration.allocation.divergence import DivergenceProbe
from nbflow.utils import system
from nbflow_experiments.compare.bootstrap import paired
from nbflow_experiments.figure_style import _DPI, _STYLE, COLOURS, GREY, place_labels
from nbflow_experiments.store.json_files import write_json
from nbflow_specs import CHECKPOINTS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "quantization.md"
WORK = Path("runs/pareto")
RUNS = Path("runs")
MODEL = "tiny_python"
CANDIDATES = ["q2", "q3_b64t1", "q3h", "q4_b64t1", "q4", "q5", "q6"]
BUDGETS = [3.0, 3.25, 3.5, 3.75, 4.0, 4.25, 4.5]
WINDOW = 256
FORMAT_PAIRS = (  # a, b: ratio of the losses b / a, both with the same quantizer
    ("q3h", "q3"), ("q3h", "q3h_b128t1"), ("q3h", "q3h_b256t1"), ("q3h", "q4_b256t1"),
    ("q3h", "q4_b128t1"), ("q3h", "iq4_xs"), ("q3h", "q4_b64t1"), ("q3h_b256t1", "q3_b64t1"),
    ("q3h_b256t1", "q3_k"), ("q3h_b256t1", "iq3_s"), ("q3_b64t1", "iq3_s"), ("q2", "iq3_xxs"),
    ("q4_b128t1", "iq4_xs"), ("q4_b64t1", "q4_k"), ("q4_b64t1", "iq4_nl"), ("q4_k", "q4"),
)  # fmt: skip
GRID_PAIRS = (  # gain of grids from input statistics, next to the gain of GPTQ codes
    ("q3_k, gptq", "iq3_s, search, inputs"), ("q3h_b256t1, gptq", "iq3_s, search, inputs"),
    ("q4_b128t1, gptq", "iq4_xs, search, inputs"), ("q4_k, gptq", "iq4_nl, search, inputs"),
    ("q3h, gptq", "iq4_xs, search, inputs"),
)  # fmt: skip
MARKS = {
    "reference": ("published quantizer", GREY, "x"),
    "search": ("search", COLOURS[0], "o"),
    "search, inputs": ("search, inputs known", COLOURS[3], "D"),
    "gptq": ("gptq", COLOURS[1], "s"),
}
QUANTIZERS = {"search": "search", "search, inputs": "search, inputs known", "gptq": "gptq"}
GRIDS = ("iq3_xxs", "iq3_s", "iq4_xs", "iq4_nl")
QUANTIZER_PAIRS = (
    "reference",
    "search, inputs",
    "hqq",
    "hadamard",
    "outliers",
    "awq",
    "gptq",
    "awq+gptq",
)
MIXED_PAIRS = (("kld-4.00", "q3h, gptq"), ("kld-3.50", "q3h, search"), ("kld-3.50", "q3, search"))


def prepare(arguments: argparse.Namespace) -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    nk.load_formats(ROOT / "experiments" / "sweeps" / "pareto_formats.py")
    text = (CHECKPOINTS / MODEL / "eval.txt").read_text("utf-8")
    middle = text.index("\n", len(text) // 2) + 1
    (WORK / "calibration.txt").write_text(text[:middle], "utf-8")
    (WORK / "evaluation.txt").write_text(text[middle:], "utf-8")
    inputs = WORK / "inputs.safetensors"
    with nbflow.load(MODEL, kv="f32") as model:
        assert model.tokenizer is not None
        ids = np.asarray(model.tokenizer.encode(text[:middle]))[: arguments.tokens]
        windows = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)
        write_stats(inputs, collect_stats(model, list(windows), full=True), force=True)
    common: dict[str, Any] = {"quantizer": "gptq", "importance": inputs}
    probe = DivergenceProbe(MODEL, WORK / "calibration.txt", n_tokens=2048, window=WINDOW)
    for kind in ("kld", "error"):
        asked = {"sensitivity": kind, "probe": probe}
        chosen = allocate(MODEL, BUDGETS, CANDIDATES, **asked, **common)
        for bits, found in zip(BUDGETS, chosen, strict=True):
            found.write(WORK / f"{kind}-{bits:.2f}.toml")
            print(kind, bits, found.n_bytes, found.budget_bytes, found.predicted)


# ---- the report -----------------------------------------------------------------------------


def label(row: Any) -> str:
    """Return the label of a point: format, quantizer, input statistics."""
    if str(row.weights).endswith(".toml"):
        return Path(str(row.weights)).stem
    known = row.importance != "" and row.quantizer == "search"
    return f"{row.weights}, {row.quantizer}" + (", inputs" if known else "")


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
    """Return the divergence ratio b / a with a paired bootstrap over windows."""
    if a not in tokens or b not in tokens:
        return None
    found = paired(tokens[a], tokens[b], WINDOW - 1, np.log)
    low, high = float(np.exp(found.low)), float(np.exp(found.high))
    change = float(np.exp(found.change))
    return {"a": a, "b": b, "ratio": change, "low": low, "high": high}


def report(arguments: argparse.Namespace) -> None:
    table, tokens = read(RUNS)
    pairs = [(f"{f}, search", f"{f}, {e}") for f in ("q3h", "q3") for e in QUANTIZER_PAIRS]
    pairs += [(f"{f}, search", f"{f}, {e}") for f in GRIDS for e in ("reference", "search, inputs")]
    pairs += [(f"{f}, gptq", f"{f}, hadamard+gptq") for f in ("q3h", "q3")]
    pairs += [("q3h, search", "q3, gptq"), *GRID_PAIRS, *MIXED_PAIRS]
    formats = {(a, b, e): ratio(tokens, f"{a}, {e}", f"{b}, {e}")
               for a, b in FORMAT_PAIRS for e in QUANTIZERS}  # fmt: skip
    comparisons = [found for a, b in pairs if (found := ratio(tokens, a, b)) is not None]
    compared = [found for found in formats.values() if found is not None]
    columns = ["bits_per_weight", "kld_mean_nats", "kld_mean_nats_stderr", "perplexity"]
    columns += ["top1_agreement_share"]
    out = ROOT / "results" / "pareto" / arguments.machine
    out.mkdir(parents=True, exist_ok=True)
    facts = {
        "commands": ["python tools/measure/pareto.py prepare",
                     "nbflow sweep experiments/sweeps/pareto.toml",
                     "nbflow sweep experiments/sweeps/pareto_mixed.toml",
                     "python tools/measure/pareto.py report"],
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "packages": system.package_versions(),
        "points": json.loads(table[columns].to_json(orient="index")),
        "comparisons": [*compared, *comparisons],
    }  # fmt: skip
    (out / "pareto.json").write_text(json.dumps(facts, indent=1) + "\n")
    for name in ("pareto", "pareto_mixed"):
        shutil.copyfile(RUNS / name / "sweep.json", out / f"{name}.sweep.json")
        launches = json.loads((RUNS / name / "provenance.json").read_text())
        write_json(out / f"{name}.provenance.json", relative(launches))
    table.to_csv(out / "points.csv")
    for policy in sorted(WORK.glob("*-?.??.toml")):
        shutil.copyfile(policy, out / policy.name)
    draw(table, out / "pareto")
    write_page(table, formats, comparisons)
    print(table[columns].to_string())
    for c in [*compared, *comparisons]:
        print(f"{c['b']} / {c['a']}: {c['ratio']:.3f} [{c['low']:.3f}, {c['high']:.3f}]")


def write_page(
    table: pd.DataFrame,
    formats: dict[tuple[str, str, str], dict[str, Any] | None],
    comparisons: list[dict[str, Any]],
) -> None:
    """Write the tables of docs/quantization.md."""
    tables = {
        "formats": _formats(table),
        "pairs": _pairs(table, formats),
        "comparisons": _comparisons(comparisons),
    }
    text = PAGE.read_text("utf-8")
    for name, lines in tables.items():
        mark = f"<!-- {name}: written by tools/measure/pareto.py -->\n"
        rows = "\n".join(lines) + "\n"
        text = re.sub(re.escape(mark) + r"(\|.*\n)*", lambda _, new=mark + rows: new, text)
    PAGE.write_text(text, "utf-8")


def _formats(table: pd.DataFrame) -> list[str]:
    """Return a row for each format and mixture, by bits: KLD by quantizer, and perplexity."""
    quantizers = ("reference", *QUANTIZERS)
    head = (
        "matrices in",
        "bits/weight",
        "KLD, reference",
        *QUANTIZERS.values(),
        "perplexity, the last",
    )
    rows = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    found = {}
    for name in dict.fromkeys(str(label).split(", ")[0] for label in table.index):
        labels = [f"{name}, {e}" for e in quantizers]
        if name.startswith("kld-") and table.bits_per_weight[name] > 3:
            labels = ["", "", "", name]
            name = "chosen one by one"
        there = [label for label in labels if label in table.index]
        if there and not name.startswith(("kld-", "error-")):
            cells = [f"{table.kld_mean_nats[x]:.4f}" if x in there else "" for x in labels]
            last = table.loc[there[-1]]
            word = f"`{name}`" if "chosen" not in name else name
            found[last.bits_per_weight, word] = [*cells, f"{last.perplexity:.3f}"]
    for (bits, name), cells in sorted(found.items()):
        rows.append(f"| {name} | {bits:g} | {' | '.join(cells)} |")
    return rows


def _pairs(
    table: pd.DataFrame, formats: dict[tuple[str, str, str], dict[str, Any] | None]
) -> list[str]:
    """Return a row for each pair of formats: the ratio with each quantizer."""
    rows = [f"| a (bits) | b (bits) | {' | '.join(QUANTIZERS.values())} |", "|---|---|---|---|---|"]
    bits = table.bits_per_weight
    for a, b in FORMAT_PAIRS:
        cells = [f"`{name}` ({bits[f'{name}, search']:g})" for name in (a, b)]
        for quantizer in QUANTIZERS:
            c = formats[a, b, quantizer]
            cells.append(
                "" if c is None else f"{c['ratio']:.2f} ({c['low']:.2f} to {c['high']:.2f})"
            )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _comparisons(comparisons: list[dict[str, Any]]) -> list[str]:
    rows = ["| a | b | KLD of b / KLD of a | 95 % interval |", "|---|---|---:|---|"]
    for c in comparisons:
        rows.append(
            f"| {c['a']} | {c['b']} | {c['ratio']:.2f} | {c['low']:.2f} to {c['high']:.2f} |"
        )
    return rows


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw stored bits against divergence: a line for each format, from quantizer to quantizer."""
    with plt.rc_context(_STYLE | {"svg.hashsalt": "nbflow"}):
        figure, axes = plt.subplots(figsize=(8.4, 5.6), layout="constrained")
        names = [
            str(n).removesuffix(", search") for n in table.index if str(n).endswith(", search")
        ]
        bits = table.bits_per_weight
        equal: dict[float, int] = {}
        lines = []  # per format: name, position, divergence by quantizer
        for name in names:
            x = bits[f"{name}, search"]
            equal[x] = equal.get(x, -1) + 1
            there = {e: f"{name}, {e}" for e in MARKS if f"{name}, {e}" in table.index}
            kld = {e: float(table.kld_mean_nats[label]) for e, label in there.items()}
            lines.append((name.removesuffix("t1"), x + 0.035 * equal[x], kld))
        for _, x, kld in lines:
            axes.plot([x, x], [min(kld.values()), max(kld.values())], color=GREY, linewidth=0.7)
        for quantizer, (label, colour, marker) in MARKS.items():
            points = [(x, kld[quantizer]) for _, x, kld in lines if quantizer in kld]
            axes.scatter(*zip(*points, strict=True), c=colour, marker=marker, s=20, zorder=3,
                         label=label)  # fmt: skip
        mixed = table[table.index.str.startswith("kld-")].sort_values("bits_per_weight")
        axes.plot(mixed.bits_per_weight, mixed.kld_mean_nats, color=COLOURS[2], marker="^",
                  markersize=4, label="chosen matrix by matrix, gptq", zorder=2)  # fmt: skip
        axes.set_yscale("log")
        axes.set_xlabel("stored bits per weight (equal ones are drawn side by side)")
        axes.set_ylabel("KL divergence from float32, nats per token")
        axes.legend(loc="lower left")
        label_lines(axes, lines, mixed)
        for kind, meta in (("png", {"Software": None}), ("svg", {"Date": None})):
            figure.savefig(path.with_suffix(f".{kind}"), dpi=_DPI, metadata=meta)
        plt.close(figure)


def label_lines(
    axes: Any, lines: list[tuple[str, float, dict[str, float]]], mixed: pd.DataFrame
) -> None:
    """Place the format names next to the lines, without overlap."""
    labels, x, kld = (list(part) for part in zip(*lines, strict=True))
    low, high = ([f(k.values()) for k in kld] for f in (min, max))
    y = [k["search"] for k in kld]
    reach = (
        [b - a for a, b in zip(low, y, strict=True)],
        [b - a for a, b in zip(y, high, strict=True)],
    )
    n = len(mixed)
    place_labels(
        axes, [*labels, *[""] * n], [*x, *mixed.bits_per_weight], [*y, *mixed.kld_mean_nats],
        tuple([*part, *[0.0] * n] for part in reach),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="bits against divergence on the bundled model")
    parser.add_argument("what", choices=("prepare", "report"))
    parser.add_argument("--tokens", type=int, default=16384, help="calibration tokens")
    parser.add_argument("--machine", default=machine_name(), help="folder in results/pareto")
    arguments = parser.parse_args()
    (prepare if arguments.what == "prepare" else report)(arguments)


if __name__ == "__main__":
    main()
