"""Tolerance of every op and its reason; run as a module it prints the Markdown table."""

from __future__ import annotations

from collections.abc import Iterable

from nbflow_kernels.op_case import OpCase
from nbflow_kernels.op_registry import all_cases


def tolerance_table(cases: Iterable[OpCase]) -> str:
    """Return a Markdown table: op, case, tolerances, and the reason for them."""
    lines = ["| op | case | rtol | atol | reason |", "|---|---|---|---|---|"]
    for case in cases:
        limits = "exact | exact" if case.exact else f"{case.rtol:.1e} | {case.atol:.1e}"
        reason = case.reason.replace("|", "\\|")
        lines.append(f"| `{case.op}` | {case.name} | {limits} | {reason} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tolerances of all families: ``python -m nbflow_kernels.testing.tolerances``."""
    print(tolerance_table(all_cases()))


if __name__ == "__main__":
    main()
