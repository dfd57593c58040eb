"""Numbers in the text are those of the rows that a comment behind them names.

    <!-- rows: results/pareto/amd-epyc-2-cores/pareto.json
    0.055 points / q3h, search / kld_mean_nats
    -->

Every line has a number as the text prints it and the place of its value: keys of the file with
" / " between them.  Rows of a list or table are found by their values, `weights=q3h; batch=1`, or
parts of them, `model~1.1b`; there may be several before `max COLUMN`, `min COLUMN` and `median
COLUMN`.  A number with % is a share.  In a .md or .txt file the place is a text: a line has it and
the number, without its sign.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
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
    found, start, cited = [], 0, ""
    for comment in COMMENT.finditer(text):
        cited = text[start : comment.start()].strip() or cited  # two comments may follow a text
        start = comment.end()
        for line in comment[2].strip().splitlines():
            number, _, path = line.strip().partition(" ")
            found.append((comment[1], number, path, cited))
    return found


CITED = [(page.name, *one) for page in PAGES for one in citations(page)]


def load(name: str) -> Any:
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines()))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text) if path.suffix == ".json" else text


AGGREGATES = {"max": max, "min": min, "median": statistics.median}


def value_of(data: Any, path: str) -> float:
    for key in path.split(" / "):
        how, _, column = key.partition(" ")
        if isinstance(data, dict):
            data = data[key]
        elif how in AGGREGATES:
            data = AGGREGATES[how]([float(r[column]) for r in data if r.get(column)])
        elif "=" in key:
            wanted = [re.fullmatch(r"(\w+)(=|~)(.*)", part).groups() for part in key.split("; ")]
            data = [r for r in data if all(matches(str(r[k]), how, v) for k, how, v in wanted)]
        else:
            assert len(data) == 1, f"{len(data)} rows are before {key}"
            data = data[0][key]
    return float(data)


def matches(found: str, how: str, wanted: str) -> bool:
    return found == wanted if how == "=" else wanted in found


def agrees(printed: str, value: float) -> bool:
    """Return whether a value rounds to a printed number, in its last digit."""
    match = NUMBER.fullmatch(printed)
    assert match is not None, printed
    digits = match[1].replace(",", "")
    mantissa, _, exponent = digits.partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    value *= 100 if match[2] else 1
    return abs(value - float(digits)) <= 0.5000001 * 10.0**-decimals


def plain_number(text: str) -> re.Pattern[str]:
    """Return the pattern of a number that is not part of a longer one."""
    return re.compile(rf"(?<![\d.]){re.escape(text)}(?![\d.]*\d)")


@pytest.mark.parametrize(("page", "file", "number", "path", "text"), CITED)
def test_a_cited_row_has_the_printed_number(
    page: str, file: str, number: str, path: str, text: str
) -> None:
    plain = number.replace("%", " %")
    assert plain_number(plain).search(text), f"{page}: {plain}"
    data = load(file)
    if isinstance(data, str):
        lines = [line for line in data.splitlines() if path in line]
        found = [abs(float(n)) for line in lines for n in re.findall(r"\d+\.\d+", line)]
        assert any(agrees(number, value) for value in found), (number, path, found)
    else:
        assert agrees(number, value_of(data, path)), f"{page}: {number} is cited, {path}"


def test_pages_cite_rows() -> None:
    cited = {page for page, *_ in CITED}
    assert cited >= {
        "README.md", "quantization.md", "analysis.md", "experiments.md", "engine.md",
        "partition.md", "evaluation.md", "sweeps.md", "comparison.md", "server.md",
    }  # fmt: skip


def test_rounding() -> None:
    assert agrees("0.055", 0.05454)
    assert not agrees("0.055", 0.0556)
    assert agrees("54%", 0.538)
    assert agrees("1.77e-02", 0.01767)
    assert not agrees("1.77e-02", 0.01776)
    assert agrees("5,160", 5160.3)
