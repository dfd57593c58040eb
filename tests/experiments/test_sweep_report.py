from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest
from sweep_fake_engine import FakeEngine

from nbflow_experiments.commands import report as command
from nbflow_experiments.report import write_report
from nbflow_experiments.report.data import load_results
from nbflow_experiments.report.figure import new_figure, place_labels
from nbflow_experiments.sweep import SweepOptions, run_sweep
from nbflow_kernels.errors import UsageError


def boom() -> None:
    raise RuntimeError("a <b>bad</b> & long message")


@pytest.fixture
def results(fake: FakeEngine, sweep_file: Path) -> Path:
    fake.failures["time", "q2", "0&1"] = boom
    run_sweep(SweepOptions(sweep_file, sweep_file.parent / "out"))
    return sweep_file.parent / "out" / "unit"


def test_report_is_whole_and_needs_nothing_else(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args([str(results)])) == 0
    page = (results / "report.html").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip().split("\n")[-1] == str(results / "report.html")
    assert page.count("<svg") == page.count("</svg>") == 3
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(link.startswith("#") for link in links)
    assert "@import" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(set(ids)) == len(ids)
    assert {link[1:] for link in links} <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)
    assert "a &lt;b&gt;bad&lt;/b&gt; &amp; long message" in page
    assert "Relative Frobenius error" in page  # what was measured, in the measures' words
    assert "10 measured, 2 failed" in page
    assert len(re.findall(r"<tr><td", page)) == 10


def test_figures_are_pictures_of_their_size(results: Path) -> None:
    _, figures = write_report(results)
    assert [f.name for f in figures] == [
        f"{name}.{kind}" for name in ("quality", "speed", "partitions") for kind in ("png", "svg")
    ]
    for path in figures:
        if path.suffix == ".png":
            picture = matplotlib.image.imread(path)
            assert picture.shape[1] >= 2 * 3.4 * 150  # two panels at 150 dots per inch or more
            assert np.ptp(picture) > 0.5  # not blank
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_report_elsewhere_and_with_another_format(results: Path, tmp_path: Path) -> None:
    page, figures = write_report(results, tmp_path / "r" / "x.html", "f32")
    assert page == tmp_path / "r" / "x.html"
    assert figures[0].parent == tmp_path / "r" / "figures"
    assert "Partitions with f32 weights" in page.read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="unknown format in the results 'q5'"):
        load_results(results, "q5")


@pytest.mark.usefixtures("fake")
def test_a_figure_without_data_says_why(sweep_file: Path) -> None:
    overrides = ('axes.weights=["q4"]', 'axes.partition=["0"]')
    run_sweep(SweepOptions(sweep_file, sweep_file.parent / "out", overrides))
    page, figures = write_report(sweep_file.parent / "out" / "unit")
    assert not figures
    text = page.read_text(encoding="utf-8")
    assert text.count("have only one weight format") == 2
    assert text.count("have only one partition") == 1


def test_same_results_give_same_files(results: Path) -> None:
    _, figures = write_report(results)
    first = [f.read_bytes() for f in figures]
    write_report(results)
    assert [f.read_bytes() for f in figures] == first


def test_not_results(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a results folder"):
        write_report(tmp_path)


def test_labels_do_not_overlap() -> None:
    x = [3.0, 4.0, 4.0, 5.0, 5.5, 6.5]
    y = [1.0, 0.99, 0.98, 0.97, 0.97, 0.97]
    with new_figure(1) as (figure, (panel,)):
        panel.plot(x, y, "o")
        place_labels(panel, ["q2", "q3h", "q3", "q4", "q5", "q6"], x, y)
    boxes = [text.get_window_extent() for text in panel.texts]
    assert len(boxes) == 6
    for i, box in enumerate(boxes):
        for other in boxes[i + 1 :]:
            assert not box.overlaps(other)
    assert figure.axes == [panel]
