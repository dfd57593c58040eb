"""Numbers in the text are those of the rows that a comment behind them names.

    <!-- rows: results/pareto/amd-epyc-2-cores/pareto.json
    0.055 points / q3h, search / kld_mean_nats
    -->

Every line has a number as the text prints it and the place of its value: keys of the file with
" / " between them.  Rows of a list or table are found by their values, `weights=q3h; batch=1`.  A
number with % is a share.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMENT = re.compile(r"<!-- rows: (\S+)\n(.*?)-->", re.S)
NUMBER = re.compile(r"(-?[\d,]+(?:\.\d+)?(?:e-?\d+)?)(%?)")


def citations(page: Path) -> list[tuple[str, str, str, str]]:
    """Return the file, the number, the path of its value, and the text before each citation."""
    text = page.read_text(encoding="utf-8")
    found, start = [], 0
    for comment in COMMENT.finditer(text):
        cited = text[start : comment.start()]
        start = comment.end()
        for line in comment[2].strip().splitlines():
            number, _, path = line.strip().partition(" ")
            found.append((comment[1], number, path, cited))
    return found


CITED = [(page.name, *one) for page in PAGES for one in citations(page)]


def load(name: str) -> Any:
    path = ROOT / name
    if path.suffix == ".csv":
        with path.open(encoding="utf-8") as file:
            return list(csv.DictReader(file))
    return json.loads(path.read_text(encoding="utf-8"))


def value_of(data: Any, path: str) -> float:
    for key in path.split(" / "):
        if isinstance(data, dict):
            data = data[key]
            continue
        wanted = dict(part.split("=") for part in key.split("; "))
        rows = [r for r in data if all(str(r[k]) == v for k, v in wanted.items())]
        assert len(rows) == 1, f"{len(rows)} rows are {key}"
        (data,) = rows
    return float(data)


def agrees(printed: str, value: float) -> bool:
    """Return whether a value rounds to a printed number, in its last digit."""
    match = NUMBER.fullmatch(printed)
    assert match is not None, printed
    digits = match[1].replace(",", "")
    mantissa, _, exponent = digits.partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    value *= 100 if match[2] else 1
    return abs(value - float(digits)) <= 0.5000001 * 10.0**-decimals


@pytest.mark.parametrize(("page", "file", "number", "path", "text"), CITED)
def test_a_cited_row_has_the_printed_number(
    page: str, file: str, number: str, path: str, text: str
) -> None:
    plain = number.replace("%", " %")
    assert re.search(rf"(?<![\d.]){re.escape(plain)}(?![\d.]*\d)", text), f"{page}: {plain}"
    assert agrees(number, value_of(load(file), path)), f"{page}: {number} is cited, {path}"


def test_pages_cite_rows() -> None:
    cited = {page for page, *_ in CITED}
    assert {"README.md", "quantization.md", "analysis.md"} <= cited


def test_rounding() -> None:
    assert agrees("0.055", 0.05454)
    assert not agrees("0.055", 0.0556)
    assert agrees("54%", 0.538)
    assert agrees("1.77e-02", 0.01767)
    assert not agrees("1.77e-02", 0.01776)
    assert agrees("5,160", 5160.3)
