"""Write docs/schema and the tables of fields in docs.

    python tools/docs/spec_schema.py

A test fails if they are stale.
"""

from __future__ import annotations

import json
from pathlib import Path

from nbflow.spec.fields import FIELDS, LAYER_FIELDS
from nbflow.spec.json_schema import family_schema, fields_table, model_schema

DOCS = Path(__file__).parents[2] / "docs"
TABLES = {
    DOCS / "family_files.md": ("fields", FIELDS),
    DOCS / "bring_your_own_architecture.md": ("layer", LAYER_FIELDS),
}
"""Page -> the name of its table, and the fields."""


def contents() -> dict[Path, str]:
    """Return the expected content of each file."""
    pages = {}
    for path, (name, known) in TABLES.items():
        begin = f"<!-- {name}: made by tools/docs/spec_schema.py -->\n"
        end = f"<!-- end of {name} -->\n"
        before, rest = path.read_text(encoding="utf-8").split(begin)
        pages[path] = f"{before}{begin}\n{fields_table(known)}\n\n{end}{rest.split(end)[1]}"
    return {
        DOCS / "schema" / "family.json": json.dumps(family_schema(), indent=1) + "\n",
        DOCS / "schema" / "model.json": json.dumps(model_schema(), indent=1) + "\n",
        **pages,
    }


def main() -> None:
    """Write the files."""
    for path, text in contents().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
