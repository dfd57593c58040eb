"""Table of docs/board.md: the published rows of `nbflow board`."""

from __future__ import annotations

from experiment_tables import markdown

from nbflow_experiments.compare.board import board, published


def board_table() -> str:
    """Return all parts of the board in one table."""
    body = []
    for budget, part in board(published()).items():
        for entry in part:
            place = f"at most {budget:g}" if entry is part[0] else ""
            difference = ""
            if entry is not part[0]:
                change = entry.against(part[0])
                difference = f"{change.change:+.4f} ({change.low:+.4f} to {change.high:+.4f})"
            body.append([
                place, f"`{entry.format}`", f"{entry.bits:.4g}",
                f"{entry.divergence:.4f} ± {entry.half_width:.4f}", difference,
            ])  # fmt: skip
    return markdown(["stored bits", "format", "bits", "KLD", "to the best of the part"], body)
