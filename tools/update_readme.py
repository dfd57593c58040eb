"""Write the tables of README.md from the code, between their markers.

python tools/update_readme.py          write them
python tools/update_readme.py --check  exit 1 if a table is not what the code says
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def ops_table() -> str:
    """Return the table of op families and their variants."""
    from nbflow_kernels.families import FAMILIES

    lines = ["| family | functions | reference | CPU | CUDA |", "|---|---|---|---|---|"]
    for family, names in FAMILIES.items():
        functions = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| `{family}` | {functions} | NumPy float64 | Numba | not yet |")
    return "\n".join(lines)


def formats_table() -> str:
    """Return the table of weight formats with their errors."""
    from nbflow_kernels.quants.table import table

    return table()


TABLES: dict[str, Callable[[], str]] = {"ops": ops_table, "formats": formats_table}


def updated(text: str) -> str:
    """Return the README's text with fresh tables."""
    for name, make in TABLES.items():
        marker = f"<!-- {name}: written by tools/update_readme.py -->\n"
        pattern = re.escape(marker) + r"(?:\|.*\n)*"
        if not re.search(pattern, text):
            raise SystemExit(f"README.md has no marker for the table {name!r}")
        table = f"{marker}{make()}\n"
        text = re.sub(pattern, lambda _, table=table: table, text)
    return text


def main() -> None:
    before = README.read_text(encoding="utf-8")
    after = updated(before)
    if "--check" in sys.argv:
        sys.exit(0 if before == after else "README.md: run python tools/update_readme.py")
    README.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
