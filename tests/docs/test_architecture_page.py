"""The architecture page: its links, names and picture match the source tree."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def drawing():
    sys.path.insert(0, str(ROOT / "tools" / "docs"))
    try:
        import architecture_picture
    finally:
        sys.path.remove(str(ROOT / "tools" / "docs"))
    return architecture_picture


def test_every_step_names_something_in_the_linked_file():
    steps = re.findall(r"^\d+\. \*\*(\w+)\*\* \[`(\w+)`\]\(\.\./([^)]+)\)", PAGE, flags=re.M)
    assert len(steps) == len(re.findall(r"^\d+\. ", PAGE, flags=re.M))
    for room, name, path in steps:
        assert room in Path(path).parts[:-1], (room, path)
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(async def|def|class) {name}\b", source, flags=re.M), (name, path)


def test_the_walks_are_short():
    weight, request = re.split(r"^## ", PAGE, flags=re.M)[1:3]
    assert len(re.findall(r"^\d+\. ", weight, flags=re.M)) <= 18
    assert len(re.findall(r"^\d+\. ", request, flags=re.M)) <= 40


def test_the_picture_has_every_package_and_is_up_to_date(drawing):
    named = " ".join(" ".join(box) for _, boxes in drawing.ROWS for box in boxes)
    for package in ("nbflow", "kernels/nbflow_kernels"):
        for folder in sorted((ROOT / package).iterdir()):
            if (folder / "__init__.py").exists():
                assert re.search(rf"\b{folder.name}\b", named), folder.name
    written = drawing.PICTURE.read_text(encoding="utf-8")
    assert written == drawing.picture(PAGE), "run python tools/docs/architecture_picture.py"
