"""Tables for documents: Markdown, and LaTeX with booktabs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nbflow_experiments.settings import SETTINGS
from nbflow_experiments.store.results_reader import Row

QUOTED = (
    "bits_per_weight", "weight_error_relative", "perplexity", "kld_mean_nats",
    "top1_agreement_share", "prefill_tokens_per_s", "decode_tokens_per_s", "batching_tokens_per_s",
    "batching_speedup", "prefix_ttft_s", "prefix_ttft_speedup", "cascade_flat_s",
    "cascade_shared_speedup", "cascade_levels_speedup", "cascade_byte_ratio",
    "speculation_accepted_share", "speculation_speedup", "traffic_bytes_per_token", "weight_bytes",
)  # fmt: skip
"""Default columns of a table, in addition to the settings that vary."""
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip


def quoted_columns(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return the varying settings and the headline metrics present in the rows."""
    varying = [name for name in SETTINGS if len({row[name] for row in rows}) > 1]
    shown = [
        name for name in QUOTED if name in columns and any(row[name] is not None for row in rows)
    ]
    status = ["status"] if any(row["status"] != "done" for row in rows) else []
    return [*(varying or ["weights"]), *shown, *status]


def to_markdown(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a table in Markdown; numbers are rounded, with their standard errors."""
    head = [f"`{name}`" for name in columns]
    lines = [head, [_rule(rows, name) for name in columns]]
    lines += [[_cell(row, name).replace("|", "\\|") for name in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_latex(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a tabular environment with the rules of booktabs."""
    kinds = "".join("r" if _rule(rows, name) == "---:" else "l" for name in columns)
    lines = [
        f"\\begin{{tabular}}{{{kinds}}}",
        r"\toprule",
        " & ".join(_escape(name) for name in columns) + r" \\",
        r"\midrule",
    ]
    for row in rows:
        cells = [_escape(_cell(row, name)).replace(" ± ", r" $\pm$ ") for name in columns]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _rule(rows: Sequence[Row], name: str) -> str:
    return "---" if any(isinstance(row[name], str) for row in rows) else "---:"


def _cell(row: Row, name: str) -> str:
    """Return one value as text: numbers to four digits, with a standard error if known."""
    text, error = number(row[name]), row.get(f"{name}_stderr")
    if isinstance(error, float) and math.isfinite(error) and row[name] is not None:
        text += f" ± {error:.2g}"
    return text


def number(value: Any) -> str:
    """Format a value for readers.

    Examples
    --------
    >>> number(None), number(7), number(0.05432109), number(123456.7), number("q4")
    ('', '7', '0.05432', '123,457', 'q4')
    """
    if value is None:
        return ""
    if not isinstance(value, float):
        return " ".join(str(value).split())
    if not math.isfinite(value):
        return str(value)
    if value == round(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _escape(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
