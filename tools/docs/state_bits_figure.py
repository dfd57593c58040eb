"""Figure of docs/state_formats.md: divergence against bits, one line per kind of numbers.

    python tools/docs/state_bits_figure.py

Writes figures/kinds.png and .svg next to the rows of the sweep `state_bits`.
"""

from __future__ import annotations

import json
from typing import Any

from experiment_tables import folder_of
from state_bits_table import KINDS

from nbflow_experiments.figure_style import (
    Drawing,
    launch_facts,
    legend_above,
    new_figure,
    series_style,
)
from nbflow_experiments.store.results_reader import read_points
from nbflow_kernels.formats import FORMATS
from nbflow_kernels.state_format import state_bytes

WINDOW = 512


def main() -> None:
    folder = folder_of("state_bits")
    assert folder is not None, "run the sweep and publish it first"
    rows = [r for r in read_points(folder)[1] if r["status"] == "done"]
    rows = [r for r in rows if r["eval_window"] == WINDOW]
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    series: dict[str, list[tuple[float, float]]] = {}
    for pattern, name in KINDS.items():
        found = [r for r in rows if r["weights"].startswith(f"{pattern}=")]
        if not found:
            continue
        series[f"{name} weights"] = [
            (FORMATS[r["weights"].split("=")[1]].bits_per_weight, r["kld_mean_nats"]) for r in found
        ]
    for form, name in (("chunks", "states, read as a prompt"), ("steps", "states, token by token")):
        last = [r for r in steps if r["form"] == form and r["first_position"] >= WINDOW // 2]
        series[name] = [_mean(last, state) for state in ("f16", "bf16", "q8_0")]
    with new_figure(1, 3.4) as (figure, (panel,)):
        for i, (name, points) in enumerate(series.items()):
            x, y = zip(*sorted(points), strict=True)
            line = "-" if name.endswith("weights") else "none"
            panel.plot(x, y, label=name, **{**series_style(i), "linestyle": line})
        panel.set_yscale("log")
        panel.set_xlabel("bits per number")
        panel.set_ylabel("KL divergence (nat/token)")
        legend_above(figure, panel)
    title = f"Formats of each kind of matrix, and of states; windows of {WINDOW} tokens"
    launches = json.loads((folder / "provenance.json").read_text())["launches"]
    drawing = Drawing(figure, title, "")
    drawing.save(folder / "figures", "kinds", launch_facts(launches[-1]))


def _mean(rows: list[dict[str, Any]], state: str) -> tuple[float, float]:
    """Return the bits of a state's format and the mean divergence of rows with it."""
    values = [row["kld_mean_nats"] for row in rows if row["state"] == state]
    return state_bytes((32,), state) * 8 / 32, sum(values) / len(values)


if __name__ == "__main__":
    main()
