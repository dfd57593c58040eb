"""How exact every op is, and why: ``python -m nbflow_kernels.tolerances`` prints it as Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from nbflow_kernels.families import all_cases
from nbflow_kernels.opcase import OpCase


def tolerance_table(cases: Iterable[OpCase]) -> str:
    """Return a Markdown table: op, case, tolerances, and the reason for them."""
    lines = ["| op | case | rtol | atol | reason |", "|---|---|---|---|---|"]
    for case in cases:
        limits = "exact | exact" if case.exact else f"{case.rtol:.1e} | {case.atol:.1e}"
        reason = case.reason.replace("|", "\\|")
        lines.append(f"| `{case.op}` | {case.name} | {limits} | {reason} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tolerances of all families: ``python -m nbflow_kernels.tolerances``."""
    print(tolerance_table(all_cases()))


if __name__ == "__main__":
    main()
