"""Prepare and report the Pareto sweeps over formats and quantizers.

    python tools/measure/pareto.py prepare [--tokens N]     # writes runs/pareto
    nbflow sweep experiments/sweeps/pareto.toml
    nbflow sweep experiments/sweeps/pareto_mixed.toml
    python tools/measure/pareto.py report [--machine NAME]  # writes results/pareto/NAME
    python tools/measure/pareto.py draw [--machine NAME]    # only the figure, from pareto.json

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
import numpy as np
import pandas as pd
from formats import machine_name
from matplotlib.transforms import Bbox, ScaledTranslation
from publish_sweep import relative

import nbflow
import nbflow_kernels as nk
from nbflow.calibration import collect_stats, write_stats
from nbflow.calibration.allocation import allocate
from nbflow.calibration.allocation.divergence import DivergenceProbe
from nbflow.utils import system
from nbflow_experiments.compare.bootstrap import paired
from nbflow_experiments.figure_style import COLOURS, GREY, Drawing, launch_facts, new_figure
from nbflow_experiments.store.json_files import write_json
from nbflow_specs import CHECKPOINTS

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
    nk.load_plugin(ROOT / "experiments" / "sweeps" / "pareto_formats.py")
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
    draw(out)
    write_page(table)
    write_comparisons(out / "comparisons.md", table, formats, comparisons)
    print(table[columns].to_string())
    for c in [*compared, *comparisons]:
        print(f"{c['b']} / {c['a']}: {c['ratio']:.3f} [{c['low']:.3f}, {c['high']:.3f}]")


def write_page(table: pd.DataFrame) -> None:
    """Write the table of docs/quantization.md."""
    mark = "<!-- formats: written by tools/measure/pareto.py -->\n"
    new = mark + "\n".join(_formats(table)) + "\n"
    text = re.sub(re.escape(mark) + r"(\|.*\n)*", lambda _: new, PAGE.read_text("utf-8"))
    PAGE.write_text(text, "utf-8")


def write_comparisons(
    path: Path,
    table: pd.DataFrame,
    formats: dict[tuple[str, str, str], dict[str, Any] | None],
    comparisons: list[dict[str, Any]],
) -> None:
    """Write the ratios of pairs with their intervals."""
    parts = (
        "# KL divergence of pairs: ratios with 95 % intervals",
        "Paired bootstrap over windows of 255 tokens, 10,000 resamples:",
        "two formats with the same quantizer, KLD(b) / KLD(a);",
        "\n".join(_pairs(table, formats)),
        "two quantizers on the same format, and mixtures.",
        "\n".join(_comparisons(comparisons)),
    )
    path.write_text("\n\n".join(parts) + "\n", "utf-8")


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


# ---- the figure -----------------------------------------------------------------------------


def draw(folder: Path) -> None:
    """Draw stored bits against divergence from ``pareto.json``: a line for each format."""
    points = json.loads((folder / "pareto.json").read_text("utf-8"))["points"]
    launch = json.loads((folder / "pareto.provenance.json").read_text("utf-8"))["launches"][-1]
    table = pd.DataFrame.from_dict(points, orient="index").sort_values(
        "bits_per_weight", kind="stable"
    )
    mixed = table[table.index.str.startswith("kld-")]
    with new_figure(1, 5.6, 8.4) as (figure, (axes,)):
        for quantizer, (word, colour, marker) in MARKS.items():
            part = table[table.index.str.endswith(f", {quantizer}")]
            axes.scatter(part.bits_per_weight, part.kld_mean_nats, c=colour, marker=marker, s=20,
                         zorder=3, label=word)  # fmt: skip
        axes.plot(mixed.bits_per_weight, mixed.kld_mean_nats, color=COLOURS[2], marker="^",
                  markersize=4, label="chosen matrix by matrix, gptq", zorder=2)  # fmt: skip
        axes.set_yscale("log")
        axes.margins(x=0.07)
        axes.set_xlabel("stored bits per weight")
        axes.set_ylabel("KL divergence from float32 (nat/token)")
        axes.legend(loc="lower left")
        label_formats(axes, table, mixed)
    error = (table.kld_mean_nats_stderr / table.kld_mean_nats).max()
    origin = f"pareto: {MODEL}; {len(table)} points; {launch_facts(launch)}"
    title = f"Bits per weight against KL divergence; standard errors are at most {error:.1%}"
    Drawing(figure, f"{title}, within the markers", "").save(folder, "pareto", origin)


def label_formats(axes: Any, table: pd.DataFrame, mixed: pd.DataFrame) -> None:
    """Join the points of each format and write its name next to them.

    Formats of equal bits have a bracket each, on alternate sides of their points.
    """
    names = [label.removesuffix(", search") for label in table.index if label.endswith(", search")]
    named = {
        name: [f"{name}, {e}" for e in MARKS if f"{name}, {e}" in table.index] for name in names
    }
    bits = [float(table.bits_per_weight[labels[0]]) for labels in named.values()]
    figure = axes.figure
    figure.draw_without_rendering()
    pt = figure.dpi / 72
    shown = table.loc[[label for labels in named.values() for label in labels]]
    taken = [_around(axes, x, y, 3.5 * pt)
             for x, y in zip(shown.bits_per_weight, shown.kld_mean_nats, strict=True)]  # fmt: skip
    ends = axes.transData.transform(mixed[["bits_per_weight", "kld_mean_nats"]].to_numpy())
    for x in np.arange(ends[0, 0], ends[-1, 0], pt):
        y = np.interp(x, ends[:, 0], ends[:, 1])
        taken.append(Bbox.from_bounds(x - pt, y - pt, 2 * pt, 2 * pt))
    frame = axes.get_window_extent()
    taken.append(Bbox.from_extents(0, frame.y0, frame.x0 + 2 * pt, frame.y1))
    places: list[tuple[float, float, list[float]]] = []
    for x, labels in zip(bits, named.values(), strict=True):
        kld = [float(table.kld_mean_nats[label]) for label in labels]
        offset = 0.0
        if bits.count(x) > 1:  # the nearest place with no bracket at this height
            used = [at for other, at, k in places
                    if other == x and min(k) < max(kld) and min(kld) < max(k)]  # fmt: skip
            offset = next(at for at in (7.0, -7.0, 14.0, -14.0, 21.0) if at not in used)
        places.append((x, offset, kld))
        taken += _bracket(axes, x, offset, kld)
    placed = dict(zip(named, places, strict=True))
    for name in sorted(named, key=lambda name: placed[name][1] == 0):  # the least free ones first
        text = _write_name(axes, name.removesuffix("t1"), *placed[name], taken)
        taken.append(_text_box(text))


def _text_box(text: Any) -> Bbox:
    """Return the box of a text with a margin, in pixels."""
    return text.get_window_extent().padded(text.figure.dpi / 48)


def _bracket(axes: Any, x: float, offset: float, kld: list[float]) -> list[Bbox]:
    """Draw a vertical line `offset` points from `x`, joined to the points; return its box."""
    style = {"color": GREY, "linewidth": 0.7, "zorder": 1}
    scale = axes.figure.dpi_scale_trans
    shifted = axes.transData + ScaledTranslation(offset / 72, 0, scale)
    axes.plot([x, x], [min(kld), max(kld)], transform=shifted, **style)
    for y in kld if offset else []:
        line = {"arrowstyle": "-", "shrinkA": 0, "shrinkB": 0, **style}
        axes.annotate("", (x, y), (offset, 0), textcoords="offset points", arrowprops=line)
    low, high = (_around(axes, x, end(kld), 1.0) for end in (min, max))
    return [Bbox.union([low, high]).translated(offset * axes.figure.dpi / 72, 0)]


def _write_name(
    axes: Any, name: str, x: float, offset: float, kld: list[float], taken: list[Bbox]
) -> Any:
    """Write a name next to a line where it covers least; return the text."""
    sides = [1, -1] if offset >= 0 else [-1, 1]
    heights = sorted({*kld, *np.geomspace(min(kld), max(kld), 9)}, reverse=True)
    tries = [(side, y, offset + side * (6 if offset == 0 else 3), 0.0)
             for side in sides[: 1 if offset else 2] for y in heights]  # fmt: skip
    tries += [(side, max(kld), -3.0 * side, 10.0) for side in (1, 0, -1)]
    tries.append((0, min(kld), offset, -10.0))
    texts = []
    for side, y, right, up in tries:
        align = {"ha": {1: "left", -1: "right", 0: "center"}[side], "va": "center"}
        at = {"xytext": (right, up), "textcoords": "offset points"}
        texts.append(axes.annotate(name, (x, y), **at, **align, fontsize=8))
    best = min(texts, key=lambda text: _covered(_text_box(text), taken))
    for text in texts:
        if text is not best:
            text.remove()
    best.set_in_layout(False)
    return best


def _covered(box: Bbox, taken: list[Bbox]) -> float:
    """Return the area of a box that others take."""
    shared = (Bbox.intersection(box, other) for other in taken)
    return float(sum(area.width * area.height for area in shared if area is not None))


def _around(axes: Any, x: float, y: float, half: float) -> Bbox:
    """Return the box of a point, in pixels."""
    at = axes.transData.transform((x, y))
    return Bbox.from_extents(*(at - half), *(at + half))


def main() -> None:
    parser = argparse.ArgumentParser(description="bits against divergence on the bundled model")
    parser.add_argument("what", choices=("prepare", "report", "draw"))
    parser.add_argument("--tokens", type=int, default=16384, help="calibration tokens")
    parser.add_argument("--machine", default=machine_name(), help="folder in results/pareto")
    arguments = parser.parse_args()
    if arguments.what == "draw":
        draw(ROOT / "results" / "pareto" / arguments.machine)
    else:
        (prepare if arguments.what == "prepare" else report)(arguments)


if __name__ == "__main__":
    main()
