from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from fake_backend import FakeEngine

from nbflow.utils.atomic_write import replace_atomically
from nbflow_experiments.store.json_files import plain, write_json
from nbflow_experiments.store.results_folder import ResultsFolder
from nbflow_experiments.store.summary import RESULT_COLUMNS, write_summaries
from nbflow_experiments.sweep.sweep import SweepOptions, run_sweep


@pytest.fixture
def folder(fake: FakeEngine, sweep_file: Path) -> ResultsFolder:
    def boom() -> None:
        raise RuntimeError('a message with "quotes", commas\nand two lines')

    fake.failures["time", "q2", "0&1"] = boom
    assert run_sweep(SweepOptions(sweep_file, sweep_file.parent / "out")) == 1
    return ResultsFolder(sweep_file.parent / "out" / "unit")


def summaries(folder: ResultsFolder, name: str) -> dict[str, dict[str, Any]]:
    result = folder.result(name)
    assert result is not None
    rows = result["readings"]
    return {r["metric"]: r for r in rows if r["rank"] is None and r["repeat"] is None}


def test_points_table_read_back_by_name(folder: ResultsFolder) -> None:
    table = pd.read_csv(folder.path / "points.csv", dtype={"point": str, "partition": str})
    assert len(table) == 12
    assert list(table.point) == folder.finished()
    for _, row in table.iterrows():
        config = folder.config(row.point)["config"]
        for name in ("weights", "kv", "partition", "batch", "prompt", "seed"):
            assert row[name] == config[name]
        for metric, reading in summaries(folder, row.point).items():
            assert row[metric] == reading["value"], metric  # all digits
            if reading["stderr"] is not None:
                assert row[f"{metric}_stderr"] == reading["stderr"]
    failed = table[table.status == "failed"]
    assert len(failed) == 2
    assert set(failed.error_type) == {"RuntimeError"}
    assert set(failed.error_message) == {'a message with "quotes", commas\nand two lines'}
    assert failed.decode_tokens_per_s.isna().all()
    assert failed.perplexity.notna().all()


def test_every_row_has_as_many_fields_as_the_header(folder: ResultsFolder) -> None:
    for name in ("points.csv", "results.csv"):
        with (folder.path / name).open(newline="", encoding="utf-8") as stream:
            rows = list(csv.reader(stream))
        assert len(set(rows[0])) == len(rows[0])
        assert {len(row) for row in rows} == {len(rows[0])}


def test_results_table_read_back_by_name(folder: ResultsFolder) -> None:
    table = pd.read_csv(folder.path / "results.csv", dtype={"point": str})
    assert tuple(table.columns) == RESULT_COLUMNS
    name = folder.finished()[0]
    here = table[table.point == name]
    repeats = here[(here.metric == "decode_tokens_per_s") & here.repeat.notna()]
    assert list(repeats.repeat) == [0, 1, 2]
    assert set(repeats.unit) == {"token/s"}
    median = here[(here.metric == "decode_tokens_per_s") & here.repeat.isna()]
    assert median.value.iloc[0] == np.median(repeats.value)
    assert median.n.iloc[0] == 3
    ppl = here[here.metric == "perplexity"].iloc[0]
    assert ppl.n == 4 * 31  # four windows of 32 tokens, the first of each not scored
    assert ppl.stderr == summaries(folder, name)["perplexity"]["stderr"]
    units = {"weight_bytes": "byte", "kld_mean_nats": "nat", "top1_agreement_share": "1"}
    for metric, unit in units.items():
        assert set(here[here.metric == metric].unit) == {unit}


def test_arrays_read_back_by_name(folder: ResultsFolder) -> None:
    name = folder.finished()[0]
    with h5py.File(folder.path / "results.h5", "r") as file:
        assert list(file["points"]) == folder.finished()  # the order of the sweep
        group = file["points"][name]
        assert group.attrs["weights"] == folder.config(name)["config"]["weights"]
        seconds = group["decode_s"]
        assert seconds.attrs["unit"] == "s"
        rates = 4 * group.attrs["batch"] / seconds[...]
        assert np.median(rates) == summaries(folder, name)["decode_tokens_per_s"]["value"]
        nll = group["nll_nats"]
        assert nll.attrs["unit"] == "nat"
        ppl = summaries(folder, name)["perplexity"]["value"]
        assert math.exp(nll[...].mean()) == pytest.approx(ppl, rel=1e-12)  # one float64 mean
        labels = [text.decode() for text in group["weight_error_relative_labels"]]
        assert labels == [f"layers.{i}.attn.q.weight" for i in range(3)]
        assert group["weight_error_relative"].shape == (3,)
        counts = group["kld_histogram"]
        assert counts[...].sum() == group["kld_nats"].size == 4 * 31
        assert len(group["kld_histogram_edges_nats"]) == len(counts) + 1


def test_tables_are_rebuilt_from_the_points(folder: ResultsFolder) -> None:
    before = {n: (folder.path / n).read_bytes() for n in ("points.csv", "results.csv")}
    for name in (*before, "results.h5"):
        (folder.path / name).unlink()
    write_summaries(folder)
    assert {n: (folder.path / n).read_bytes() for n in before} == before
    with h5py.File(folder.path / "results.h5", "r") as file:
        assert len(file["points"]) == 12


def test_provenance(fake: FakeEngine, folder: ResultsFolder) -> None:
    (launch,) = folder.launches()
    assert launch["world_size"] == 1
    assert launch["started"] <= launch["finished"]
    assert launch["packages"]["numpy"] == np.__version__
    assert {"numba", "llvmlite", "h5py"} <= set(launch["packages"])
    assert launch["models_sha256"] == {"toy": fake.identify("toy").digest}
    assert list(launch["datasets_sha256"]) == [str(fake.folder / "eval.txt")]
    assert launch["seeds"] == [3]
    (rank,) = launch["ranks"]
    assert rank["cpu_model"]
    assert rank["cores"] >= 1
    assert set(rank) >= {"host", "affinity", "environment"}


def test_numbers_stay_numbers(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": math.nan, "y": [1, 0.1, math.inf], "z": None})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == {"x": None, "y": [1, 0.1, None], "z": None}
    with pytest.raises(TypeError, match="cannot write a float32 to JSON"):
        plain({"x": np.float32(1)})


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write() -> None:
        with replace_atomically(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_not_a_number_reaches_the_tables(folder: ResultsFolder) -> None:
    name = folder.finished()[0]
    path = folder.folder(name) / "result.json"
    data = json.loads(path.read_text())
    for reading in data["readings"]:
        if reading["metric"] == "perplexity":
            reading["value"] = None
    path.write_text(json.dumps(data))
    write_summaries(folder)
    rows = list(csv.DictReader((folder.path / "points.csv").open(encoding="utf-8")))
    assert next(r for r in rows if r["point"] == name)["perplexity"] == "nan"
