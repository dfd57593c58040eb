from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from fake_backend import FakeEngine

from nbflow_experiments.config.points import (
    LOAD_SETTINGS,
    check_world,
    estimate_bytes,
    make_points,
    point_id,
)
from nbflow_experiments.config.sweep_file import load_sweep
from nbflow_kernels.errors import UsageError


def test_id_is_the_hash_of_the_canonical_json() -> None:
    # printf '{"a":"0&1","b":[1,2]}' | sha256sum
    expected = "96ca20ca710a5d048f0ca4826b0d52825d5e7d3ef7ec843f97136450d30786ff"
    assert point_id({"b": [1, 2], "a": "0&1"}) == expected


def test_ids_depend_on_content_only(fake: FakeEngine, sweep_file: Path) -> None:
    first = {p.id for p in make_points(load_sweep(sweep_file))}
    text = sweep_file.read_text()
    sweep_file.write_text(
        text.replace("batch = [1, 2]\n", "").replace("[axes]", "[axes]\nbatch=[2, 1]")
    )
    assert {p.id for p in make_points(load_sweep(sweep_file))} == first
    assert len(first) == 12
    changed = make_points(load_sweep(sweep_file, ["settings.decode=5"]))
    assert not first & {p.id for p in changed}
    (fake.folder / "eval.txt").write_text("1 2 3 " * 100)
    assert not first & {p.id for p in make_points(load_sweep(sweep_file))}


def test_text_does_not_matter_where_no_measure_reads_it(fake: FakeEngine, sweep_file: Path) -> None:
    only = ['sweep.measures=["decode"]']
    first = [p.id for p in make_points(load_sweep(sweep_file, only))]
    (fake.folder / "eval.txt").unlink()
    assert [p.id for p in make_points(load_sweep(sweep_file, only))] == first
    with pytest.raises(UsageError, match=r"toy brings no eval\.txt"):
        make_points(load_sweep(sweep_file))


@pytest.mark.usefixtures("fake")
def test_points_that_share_a_model_stand_together(sweep_file: Path) -> None:
    keys = [p.key(LOAD_SETTINGS) for p in make_points(load_sweep(sweep_file))]
    changes = sum(a != b for a, b in itertools.pairwise(keys))
    assert changes + 1 == len(set(keys)) == 6


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("settings.prompt=60", r"prompt \+ 1 \+ decode must be at most 64 .* 60 \+ 1 \+ 4 = 65"),
        ("settings.max_context=65", "max_context must be at most 64"),
        ("settings.max_context=12", r"at most 12 tokens.* = 13"),
        ("settings.eval_text=nowhere.txt", r"eval_text: the file .*nowhere\.txt does not exist"),
    ],
)
def test_lengths_that_do_not_fit(sweep_file: Path, override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_points(load_sweep(sweep_file, [override]))


@pytest.mark.usefixtures("fake")
def test_partition_must_fit_the_ranks(sweep_file: Path) -> None:
    points = make_points(load_sweep(sweep_file, ['axes.partition=["0", "1&3"]']))
    check_world(points, 1)  # without mpirun any partition runs in process
    check_world(points, 4)
    with pytest.raises(UsageError, match=r"'1&3' names rank 3, .* 2 ranks .*mpirun -n 4"):
        check_world(points, 2)


def test_estimated_bytes(fake: FakeEngine, sweep_file: Path) -> None:
    point = next(
        p for p in make_points(load_sweep(sweep_file)) if p.key(("weights", "batch")) == ("q4", 2)
    )
    # KV cache of 2 x (8 + 4) tokens
    assert estimate_bytes(point) == {
        "weight_bytes": 5000, "kv_bytes": 2 * 12 * 64, "state_bytes": 0,
    }  # fmt: skip
