"""Every recorded column has a definition, and its unit is the recorded one."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from nbflow_experiments.columns import METRICS, RESULTS, STATUS
from nbflow_experiments.measures import MEASURES
from nbflow_experiments.settings import SETTINGS
from nbflow_experiments.store.summary import RESULT_COLUMNS

ROOT = Path(__file__).parents[2]
POINTS = sorted(ROOT.glob("results/*/*/points.csv"))
NUMBERS = sorted(ROOT.glob("results/*/*/results.csv"))
UNITS = {name: unit for columns in METRICS.values() for name, (unit, _) in columns.items()}


def test_measures_and_result_columns_are_those_of_the_code():
    assert set(METRICS) == {"", "prediction", *MEASURES}
    assert tuple(RESULTS) == RESULT_COLUMNS


@pytest.mark.parametrize("path", POINTS, ids=lambda path: path.parts[-3])
def test_recorded_columns_are_defined(path):
    with path.open(encoding="utf-8", newline="") as file:
        head = next(csv.reader(file))
    # tools/measure/pareto.py labels its rows
    known = {
        "label",
        *STATUS,
        *SETTINGS,
        *UNITS,
        *(f"{name}_stderr" for name in UNITS),
    }
    assert set(head) <= known


@pytest.mark.parametrize("path", NUMBERS, ids=lambda path: path.parts[-3])
def test_recorded_units_are_the_defined_ones(path):
    with path.open(encoding="utf-8", newline="") as file:
        found = {(row["measure"], row["metric"], row["unit"]) for row in csv.DictReader(file)}
    assert found
    for measure, metric, unit in found:
        assert METRICS[measure][metric][0] == unit, metric
