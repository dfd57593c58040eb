"""Summary at the top of a report: what the sweep says, and what it cannot say."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import Any

from nbflow_experiments.report.data import Results, failure_text

LEAST_S = 0.5
"""Shortest time of a repetition whose speed is compared."""


def pareto(rows: Any, cost: str, error: str) -> Any:
    """Return the rows that no other row beats in both columns, by rising cost."""
    best = rows.dropna(subset=[cost, error]).sort_values([cost, error], kind="stable")
    below = best[error].cummin().shift()
    return best[~(best[error] >= below)]


def repetition_s(rows: Any) -> dict[str, float]:
    """Return the shortest median time of a repetition of prefill and decode, in seconds.

    A repetition repeats its work for at least `min_repetition_s`, where the table has the column.
    """
    least = rows.min_repetition_s if "min_repetition_s" in rows else 0.0
    found = {}
    for name in ("prefill", "decode"):
        column = f"{name}_tokens_per_s"
        if column in rows and rows[column].notna().any():
            length = rows.prompt if name == "prefill" else rows.decode
            found[name] = float((rows.batch * length / rows[column]).clip(lower=least).min())
    return found


def statements(results: Results) -> list[str]:
    """Return the sentences of the summary."""
    rows, lines = results.done, []
    error = next((e for e in ("kld_mean_nats", "perplexity") if e in rows), "")
    if error and rows.weights.nunique() > 1:
        name = "KL divergence" if error == "kld_mean_nats" else "perplexity"
        names = ("quantizer", "outliers", "kv", "kv_rotation", "state", "kv_keys", "activations")
        settings = ["weights", *results.varying([n for n in names if n in rows])]
        by_error = pareto(rows.drop_duplicates(settings), "bits_per_weight", error)
        items = (
            f"{', '.join(str(row[name]) for name in settings)} "
            f"({row.bits_per_weight:g} bits: {row[error]:.3g})"
            for _, row in by_error.iterrows()
        )
        lines.append(f"Least {name} for its bits: {'; '.join(items)}.")
    too_short = {n: s for n, s in repetition_s(rows).items() if s < LEAST_S}
    for name, seconds in too_short.items():
        lines.append(
            f"Too short to compare: repetitions of {name} last {1e3 * seconds:.3g} ms and more; "
            f"differences of speed count from {LEAST_S} s on (raise min_repetition_s, "
            f"{_setting(name)} or batch)."
        )
    if "decode" not in too_short and "decode_tokens_per_s" in rows:
        best = rows.loc[rows.decode_tokens_per_s.idxmax()]
        lines.append(
            f"Fastest decode: {best.decode_tokens_per_s:,.0f} tokens/s ({best.weights}, partition "
            f"{best.partition}, batch {best.batch})."
        )
    lost = len(results.points) - len(rows)
    if lost:
        lines.append(f"{lost} points failed; they are listed below.")
    return lines + _failed_measures(results)


def _failed_measures(results: Results) -> list[str]:
    """Return a sentence for each measure of the user that failed in points that are shown."""
    shown = set(results.done.point)
    failed = [f for f in results.failures if f["point"] in shown]
    lines = []
    for step in dict.fromkeys(f["step"] for f in failed):
        texts = [failure_text(f) for f in failed if f["step"] == step]
        lines.append(
            f"Measure failed in {len(texts)} of {len(results.points)} points, the first "
            f"{texts[0]}; the numbers of the built-in measures are shown."
        )
    return lines


def summary_html(results: Results, folder: Path) -> str:
    """Return the summary as HTML, with links from `folder` to the raw files."""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in statements(results))
    files = ("points.csv", "results.csv", "results.h5", "provenance.json", "figures")
    links = ", ".join(
        f'<a href="{_link(results.path / name, folder)}">{name}</a>'
        for name in files
        if (results.path / name).exists()
    )
    return f"<ul>{items}</ul><p>Raw data: {links}.</p>"


def _link(path: Path, folder: Path) -> str:
    return html.escape(Path(os.path.relpath(path, folder)).as_posix(), quote=True)


def _setting(name: str) -> str:
    return "prompt" if name == "prefill" else "decode"
