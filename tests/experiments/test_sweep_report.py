from __future__ import annotations

import html
import importlib
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from browser import CHROMIUM, Browser
from fake_backend import FakeEngine

from nbflow_experiments.commands import report as command
from nbflow_experiments.figure_style import (
    Drawing,
    NotDrawn,
    legend_above,
    new_figure,
    series_style,
)
from nbflow_experiments.measures import Context, register_measure, unregister_measure
from nbflow_experiments.report import cascade, quality, serving, speed, write_report
from nbflow_experiments.report.data import Results, load_results
from nbflow_experiments.report.html_page import render_page
from nbflow_experiments.report.summary import LEAST_S, pareto, repetition_s, statements
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep
from nbflow_kernels.errors import UsageError


def boom() -> None:
    raise RuntimeError("a <b>bad</b> & long message")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, sweep_text: str) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "unit.toml").write_text(sweep_text)
    with pytest.MonkeyPatch.context() as patch:
        fake = FakeEngine(folder / "model").install(patch.setattr)
        fake.failures["time", "q2", "0&1"] = boom
        run_sweep(SweepOptions(folder / "unit.toml", folder / "out"))
        yield folder / "out" / "unit"


@pytest.fixture(scope="module")
def written(results: Path) -> tuple[Path, list[Path]]:
    """Page and figures of the report; to draw them takes seconds."""
    return write_report(results)


def test_report_is_whole_and_needs_nothing_else_and_another_has_the_same_figures(
    results: Path, written: tuple[Path, list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    import argparse

    first = [figure.read_bytes() for figure in written[1]]
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args([str(results)])) == 0
    assert [figure.read_bytes() for figure in written[1]] == first
    page = (results / "report.html").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip().split("\n")[-1] == str(results / "report.html")
    assert page.count("<svg") == page.count("</svg>") == 4
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    raw = [link for link in links if not link.startswith("#")]
    assert raw == ["points.csv", "results.csv", "results.h5", "provenance.json", "figures"]
    assert all((results / link).exists() for link in raw)
    links = [link for link in links if link not in raw]
    assert "@import" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(set(ids)) == len(ids)
    assert {link[1:] for link in links} <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)
    assert "a &lt;b&gt;bad&lt;/b&gt; &amp; long message" in page
    assert "Relative Frobenius error" in page  # definition of a measure
    assert "10 measured, 2 failed" in page
    assert len(re.findall(r"<tr><td", page)) == 10


def test_figures_are_pictures_of_their_size(written: tuple[Path, list[Path]]) -> None:
    _, figures = written
    assert [f.name for f in figures] == [
        f"{name}.{kind}"
        for name in ("quality", "memory", "speed", "partitions")
        for kind in ("png", "svg")
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


@pytest.mark.parametrize("value", [None, math.nan])
@pytest.mark.usefixtures("fake")
def test_a_measure_of_the_user_that_fails_everywhere_hides_no_other(
    sweep_file: Path, value: float | None
) -> None:
    def sour(context: Context) -> dict[str, float]:
        """Fail, or return a number that is none."""
        if value is None:
            raise ValueError("no <sugar> left")
        return {"sour_share": value}

    register_measure("sour", sour)
    overrides = (
        'axes.weights=["q4","q2"]', 'axes.partition=["0"]', "axes.batch=[1]",
        'sweep.measures=["weight_error","perplexity","sour"]',
    )  # fmt: skip
    try:
        run_sweep(SweepOptions(sweep_file, sweep_file.parent / "out", overrides))
    finally:
        unregister_measure("sour")
    folder = sweep_file.parent / "out" / "unit"
    data = load_results(folder)
    assert list(data.done.weights) == ["q4", "q2"]
    assert len(quality.draw(data).figure.axes) == 2
    error = "ValueError: no <sugar> left" if value is None else "NotFinite: not finite: sour_share"
    assert statements(data)[-1].startswith(
        f"Measure failed in 2 of 2 points, the first in sour: {error}"
    )
    page = render_page(data, [], folder)
    assert "2 measured, 0 failed" in page
    assert page.count(f"weights = q4, partition = 0: in sour: {html.escape(error)}") == 1


@pytest.mark.usefixtures("fake")
def test_where_every_point_fails_the_step_is_named(sweep_file: Path, fake: FakeEngine) -> None:
    fake.failures["time", "q4", "0"] = boom
    overrides = ('axes.weights=["q4"]', 'axes.partition=["0"]', "axes.batch=[1]")
    run_sweep(SweepOptions(sweep_file, sweep_file.parent / "out", overrides))
    with pytest.raises(
        UsageError, match="all 1 finished points failed, the first in prefill: Runt"
    ):
        load_results(sweep_file.parent / "out" / "unit")


@pytest.mark.usefixtures("fake")
def test_a_figure_without_data_says_why(sweep_file: Path) -> None:
    overrides = ('axes.weights=["q4"]', 'axes.partition=["0"]', "axes.batch=[1]")
    run_sweep(SweepOptions(sweep_file, sweep_file.parent / "out", overrides))
    page, figures = write_report(sweep_file.parent / "out" / "unit")
    assert not figures
    text = page.read_text(encoding="utf-8")
    assert text.count("have only one weight format") == 3
    assert text.count("have only one partition") == 1


def test_the_summary_names_the_best_formats_and_short_times(results: Path) -> None:
    data = load_results(results)
    lines = statements(data)
    best = pareto(data.done.drop_duplicates("weights"), "bits_per_weight", "kld_mean_nats")
    assert list(best.bits_per_weight) == sorted(best.bits_per_weight)
    assert list(best.kld_mean_nats) == sorted(best.kld_mean_nats, reverse=True)
    assert lines[0].startswith("Least KL divergence for its bits: ")
    assert lines[0].count(";") + 1 == len(best)
    shortest = repetition_s(data.done)
    row = data.done.iloc[0]
    assert shortest["decode"] <= row.batch * row.decode / row.decode_tokens_per_s
    for name, seconds in shortest.items():
        assert any(f"repetitions of {name} last" in x for x in lines) == (seconds < LEAST_S)
    assert lines[-1].startswith("2 points failed")


def test_figures_name_their_origin(results: Path) -> None:
    data = load_results(results)
    assert re.fullmatch(r"unit: .*; 10 points; .*; \d{4}-\d\d-\d\d; commit \w+", data.origin)


def test_not_results(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a results folder"):
        write_report(tmp_path)


def test_a_report_of_the_tables_alone(
    results: Path, written: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    """Results that were copied without the folders of their points."""
    whole, _ = written
    copied = tmp_path / "copied"
    copied.mkdir()
    for name in ("points.csv", "results.csv", "provenance.json", "sweep.json"):
        (copied / name).write_bytes((results / name).read_bytes())
    page, figures = write_report(copied)
    assert len(figures) == 8
    text = page.read_text(encoding="utf-8")
    assert "10 measured, 2 failed" in text
    rows = re.compile(r"<tr><td.*?</tr>", re.S)
    assert rows.findall(text) == rows.findall(whole.read_text(encoding="utf-8"))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_columns_are_sorted_by_a_click(written: tuple[Path, list[Path]], tmp_path: Path) -> None:
    page, _ = written
    column = "[...document.querySelectorAll('.sortable tbody tr')].map(r => r.cells[%d].innerText)"
    with Browser(tmp_path) as browser:
        browser.open(page.as_uri())
        heads = browser.js("[...document.querySelectorAll('.sortable th')].map(h => h.innerText)")
        at = heads.index("decode_tokens_per_s")
        browser.js(f"document.querySelectorAll('.sortable th')[{at}].click()")
        up = [float(x.replace(",", "")) for x in browser.js(column % at)]
        browser.js(f"document.querySelectorAll('.sortable th')[{at}].click()")
        down = [float(x.replace(",", "")) for x in browser.js(column % at)]
        weights = heads.index("weights")
        browser.js(f"document.querySelectorAll('.sortable th')[{weights}].click()")
        words = browser.js(column % weights)
        browser.js(
            "const box = document.querySelector('.filter'); box.value = 'q4 0&1';"
            "box.dispatchEvent(new Event('input'))"
        )
        shown = "[...document.querySelectorAll('.sortable tbody tr')].filter(r => !r.hidden).length"
        assert browser.js(shown) == 2  # two batch sizes
    assert up == sorted(up) == down[::-1]
    assert words == sorted(words)


def test_a_legend_stays_within_its_figure() -> None:
    with new_figure(1) as (figure, (panel,)):
        for i in range(9):
            panel.plot([0, 1], [i, i], label=f"a label of {i} series", **series_style(i))
        legend_above(figure, panel)
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert len(legend.get_texts()) == 9
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert len({(line.get_color(), line.get_marker()) for line in panel.lines}) == 9


def test_only_saved_figures_have_a_footer(tmp_path: Path) -> None:
    """The figure of a notebook ends with its axes; saving it again changes nothing."""
    with new_figure(1, 2.0) as (figure, (panel,)):
        panel.plot([1, 2])
    assert (figure.get_supxlabel(), figure.get_size_inches()[1]) == ("", 2.0)
    drawing = Drawing(figure, "title", "")
    first, second = (drawing.save(tmp_path, "a", "origin")[0].read_bytes() for _ in range(2))
    assert first == second
    assert figure.get_supxlabel() == "title\norigin"


def test_the_pareto_figure_has_true_bits_and_names_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "tools" / "measure"))
    tool = importlib.import_module("pareto")
    drawn: list[Drawing] = []
    monkeypatch.setattr(Drawing, "save", lambda drawing, *_: drawn.append(drawing))
    folder = root / "results" / "pareto" / "amd-epyc-2-cores"
    tool.draw(folder)
    (axes,) = drawn[0].figure.axes
    points = json.loads((folder / "pareto.json").read_text(encoding="utf-8"))["points"]
    for marks, quantizer in zip(axes.collections, tool.MARKS, strict=True):
        rows = [p for name, p in points.items() if name.endswith(f", {quantizer}")]
        true = sorted((p["bits_per_weight"], p["kld_mean_nats"]) for p in rows)
        assert sorted(map(tuple, marks.get_offsets().tolist())) == true
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
    assert len(boxes) == sum(name.endswith(", search") for name in points)
    pairs = itertools.combinations(boxes, 2)
    assert not any(one.overlaps(other) for one, other in pairs)


def served(**columns: list[object]) -> Results:
    n = len(next(iter(columns.values())))
    fixed = {
        "point": [str(i) for i in range(n)], "status": ["done"] * n, "weights": ["q4"] * n,
        "bits_per_weight": [5.0] * n, "partition": ["0"] * n, "kv": ["f16"] * n,
        "batch": [1] * n, "prompt": [64] * n, "prefix": [0] * n, "draft": ["ngram"] * n,
    }  # fmt: skip
    return Results(Path(), {}, [], pd.DataFrame(fixed | columns), [], "q4")


def speeds(**columns: list[object]) -> Results:
    n = len(next(iter(columns.values())))
    ends = {f"decode_{end}tokens_per_s": [9.0] * n for end in ("", "min_", "max_")}
    return served(**(ends | columns))


def test_speed_is_not_drawn_with_more_series_than_can_be_told_apart() -> None:
    weights = [name for name in ("q4", "f16") for _ in range(4)]
    few = speeds(weights=weights[2:6], batch=[1, 2, 1, 2])
    assert len(speed.draw(few).figure.axes) == 1
    with pytest.raises(NotDrawn, match="each format has 4 combinations of settings"):
        speed.draw(speeds(weights=weights, batch=[1, 2, 4, 8] * 2))


def test_quality_holds_the_settings_with_fewest_values_where_series_are_many() -> None:
    rows = list(itertools.product(("q4", "f16"), [f"q{i}" for i in range(7)], ("none", "hadamard")))
    weights, caches, rotations = map(list, zip(*rows, strict=True))
    data = served(
        weights=weights, kv=caches, kv_rotation=rotations, kld_mean_nats=[0.1] * len(rows),
        importance=[""] * len(rows),
    )  # fmt: skip
    drawn = quality.draw(data)
    (legend,) = drawn.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [f"kv = q{i}" for i in range(7)]
    assert drawn.title == "Bits per weight against error; kv_rotation = none"


def test_settings_without_a_value_are_named() -> None:
    data = served(importance=["", "inputs.gguf"], kld_mean_nats=[0.1, 0.2])
    labels = [label for label, _ in data.series(())]
    assert labels == ["importance = none", "importance = inputs.gguf"]


def test_throughput_of_one_line_is_left_to_the_partitions() -> None:
    with pytest.raises(NotDrawn):
        serving.draw_throughput(speeds(batch=[1, 2] * 2, partition=["0", "0", "0&1", "0&1"]))
    (panel,) = serving.draw_throughput(speeds(batch=[1, 2])).figure.axes
    assert lines(panel) == [([1, 2], [9, 9])]


def test_throughput_of_two_batch_sizes_is_left_to_speed() -> None:
    data = {"weights": ["q4", "q4", "f16", "f16"], "batch": [1, 2, 1, 2]}
    assert len(speed.draw(speeds(**data)).figure.axes) == 1
    with pytest.raises(NotDrawn):
        serving.draw_throughput(speeds(**data))


def lines(panel: object) -> list[tuple[list[float], list[float]]]:
    """Return x and y of every line with markers."""
    return [
        (list(map(float, line.get_xdata())), list(map(float, line.get_ydata())))
        for line in panel.lines  # type: ignore[attr-defined]
        if line.get_marker() in "os^Dv"
    ]


def test_the_figure_of_batching_shows_the_numbers() -> None:
    data = served(
        batch=[4, 1], batching_tokens_per_s=[80.0, 30.0], sequential_tokens_per_s=[20.0, 25.0],
        batching_ttft_s=[0.5, 0.1], sequential_ttft_s=[2.0, 0.1], batching_speedup=[4.0, 1.2],
    )  # fmt: skip
    rates, ratios, waits = serving.draw_batching(data).figure.axes
    assert lines(rates) == [([1, 4], [30, 80]), ([1, 4], [25, 20])]
    assert lines(ratios) == [([1, 4], [1.2, 4])]
    assert lines(waits) == [([1, 4], [100, 500]), ([1, 4], [100, 2000])]  # milliseconds


def test_the_figure_of_shared_prefixes_shows_the_numbers() -> None:
    data = served(
        prefix=[0, 32], prefix_cold_ttft_s=[0.4, 0.4], prefix_together_ttft_s=[0.4, 0.3],
        prefix_ttft_s=[0.4, 0.2], prefix_ttft_speedup=[1.0, 2.0],
    )  # fmt: skip
    panel = serving.draw_prefix(data).figure.axes[0]
    assert lines(panel) == [([0, 32], [400, 400]), ([0, 32], [400, 300]), ([0, 32], [400, 200])]
    assert panel.get_ylim()[0] == 0


def test_the_figure_of_cascades_shows_the_numbers() -> None:
    data = served(
        batch=[8, 2, 8], heads=["8/4/32"] * 3, shared_keys=[64] * 3, own_keys=[16, 16, 32],
        cascade_shared_speedup=[3.0, 1.5, 2.0], cascade_levels_speedup=[2.0, 0.5, 1.0],
    )  # fmt: skip
    panel = cascade.draw(data).figure.axes[0]
    assert lines(panel) == [([2, 8], [1.5, 3]), ([2, 8], [0.5, 2])]
    assert panel.get_title() == "8 query, 4 key/value heads of 32; cache f16"


def test_the_figure_of_speculation_shows_the_numbers() -> None:
    data = served(
        n_draft=[4, 2], speculation_accepted_share=[0.25, 0.5], speculation_speedup=[0.9, 1.1],
        speculation_accepted_share_stderr=[0.01, 0.02], speculation_tokens_per_step=[2.0, 2.5],
    )  # fmt: skip
    shares, steps, ratios = serving.draw_speculation(data).figure.axes
    assert lines(shares) == [([2, 4], [50, 25])]
    assert lines(steps) == [([2, 4], [2.5, 2.0])]
    assert lines(ratios) == [([2, 4], [1.1, 0.9])]
