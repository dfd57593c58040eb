"""Write docs/schema and the table of fields in docs/bring_your_own_architecture.md.

    python tools/docs/spec_schema.py

A test fails if they are stale.
"""

from __future__ import annotations

import json
from pathlib import Path

from nbflow.spec.json_schema import family_schema, fields_table, model_schema

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "bring_your_own_architecture.md"
BEGIN, END = "<!-- fields: made by tools/docs/spec_schema.py -->\n", "<!-- end of fields -->\n"


def contents() -> dict[Path, str]:
    """Return the expected content of each file."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return {
        DOCS / "schema" / "family.json": json.dumps(family_schema(), indent=1) + "\n",
        DOCS / "schema" / "model.json": json.dumps(model_schema(), indent=1) + "\n",
        PAGE: f"{before}{BEGIN}\n{fields_table()}\n\n{END}{after}",
    }


def main() -> None:
    """Write the files."""
    for path, text in contents().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
