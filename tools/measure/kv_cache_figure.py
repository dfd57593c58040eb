#!/usr/bin/env python3
"""Draw the divergence of KV caches against their bits, from the results of sweeps/kv_cache.toml.

python tools/measure/kv_cache_figure.py results/kv_cache/MACHINE
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from nbflow_experiments.figure_style import (
    Drawing,
    launch_facts,
    legend_above,
    log_values,
    new_figure,
    series_style,
)
from nbflow_experiments.store.results_reader import Row, read_points
from nbflow_kernels.kv_cache.formats import kv_format

NAME = "kv_bits"
EXACT, WEIGHTS, HEAD = "f16", "f32", 32
WAYS = (("none", "plain", "-"), ("hadamard", "rotated", "--"))
FAMILIES = (("q", "affine"), ("lm", "codebook"))


def series(rows: list[Row], side: int, family: str, rotation: str) -> list[tuple[float, Any]]:
    """Return bits and row of the caches with one side in a format of a family, by bits."""
    found = []
    for row in rows:
        names = row["kv"].split("/")
        if len(names) != 2 or names[1 - side] != EXACT or not names[side].startswith(family):
            continue
        if (row["kv_rotation"], row["kv_keys"]) == (rotation, "post_rope"):
            found.append((kv_format(names[side]).bits_per_value(HEAD), row))
    return sorted(found, key=lambda pair: pair[0])


def draw(rows: list[Row]) -> Drawing:
    """Draw keys and values alone, in the longest windows."""
    window = max(int(row["eval_window"]) for row in rows)
    rows = [r for r in rows if r["weights"] == WEIGHTS and int(r["eval_window"]) == window]
    with new_figure(2) as (figure, panels):
        for side, (panel, name) in enumerate(zip(panels, ("keys", "values"), strict=True)):
            for i, (prefix, family) in enumerate(FAMILIES):
                for j, (rotation, way, line) in enumerate(WAYS):
                    points = series(rows, side, prefix, rotation)
                    panel.errorbar(
                        [bits for bits, _ in points], [r["kld_mean_nats"] for _, r in points],
                        [r["kld_mean_nats_stderr"] for _, r in points], linestyle=line,
                        capsize=2, label=f"{family}, {way}", **series_style(i, 2 * i + j),
                    )  # fmt: skip
            panel.set_xlabel(f"stored bits per number of the {name}")
            log_values(panel.yaxis)
        panels[0].set_ylabel("divergence, nat/token")
        legend_above(figure, *panels)
    title = f"KV caches of few bits: windows of {window} tokens, one side in {EXACT}"
    return Drawing(figure, title, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    rows = [row for row in read_points(folder)[1] if row["status"] == "done"]
    launches = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["launches"]
    (folder / "figures").mkdir(exist_ok=True)
    for file in draw(rows).save(folder / "figures", NAME, launch_facts(launches[-1])):
        print(file)


if __name__ == "__main__":
    main()
