"""Tables of docs/reproduce.md: the published tables, and who has run them."""

from __future__ import annotations

import json
from pathlib import Path

from experiment_tables import markdown

from nbflow_experiments.reproduce.published_table import known_tables, load_table

ROWS = Path(__file__).parents[2] / "results" / "reproduce"


def _to_the_left(table: str) -> str:
    """Return a table whose cells are mostly text."""
    return table.replace("---:", "---")


def published_tables() -> str:
    """Return the tables with their conventions and values."""
    body = []
    for name in known_tables():
        table = load_table(name)
        how = table.convention
        values = "; ".join(
            f"{row.name}: {', '.join(f'{value:g}' for value in row.published.values())}"
            for row in table.rows
        )
        body.append([
            name, f"[{table.title}]({table.source.split()[0].rstrip(',')})", table.model,
            f"{how.context}, {how.scored}, {how.bos}", ", ".join(table.metrics), values,
        ])  # fmt: skip
    head = ["table", "what", "model", "context, scored, BOS", "metrics", "published"]
    return _to_the_left(markdown(head, body))


def recorded_runs() -> str:
    """Return the recorded rows of results/reproduce, or the statement that there are none."""
    body = []
    for file in sorted(ROWS.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            commit = (row["commit"] or "unknown")[:8]
            when = f"{row['measured'][:10]}, {row['machine']['cpu_model']}, commit {commit}"
            for metric, published in row["published"].items():
                ours = row["ours"].get(metric)
                body.append([
                    row["table"], row["row"], metric, f"{published:g}",
                    "" if ours is None else f"{ours:.5g}",
                    row["verdicts"].get(metric, row["status"]), row["model"],
                    when,
                ])  # fmt: skip
    head = ["table", "row", "metric", "published", "ours", "verdict", "model", "run"]
    return _to_the_left(markdown(head, body)) if body else "None yet.\n"
