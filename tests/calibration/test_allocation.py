"""Mixed-precision allocation: solver against brute force, policies, command."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import write_llama

import nbflow
import nbflow_kernels as nk
from nbflow import cli
from nbflow.calibration.allocation import allocate, knapsack, solve
from nbflow.checkpoint import open_weights
from nbflow.executor import WeightLoader
from nbflow.program import build, fuse
from nbflow.program.records import Operand
from nbflow.quantization.policy import WeightFormats, is_quantized, weight_formats, write_policy
from nbflow.spec import resolve
from nbflow_kernels.errors import UsageError

Q = "layers.0.attn.q.weight"
DOWN = "layers.0.ffn.down.weight"
CANDIDATES = ("q2", "q3h", "q8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("allocation") / "model"
    write_llama(folder, n_layers=1)
    return folder


def brute_force(costs: np.ndarray, sizes: np.ndarray, budget: int) -> float:
    items = np.arange(len(costs))
    choices = map(list, itertools.product(range(costs.shape[1]), repeat=len(costs)))
    return min(costs[items, c].sum() for c in choices if sizes[items, c].sum() <= budget)


@pytest.mark.parametrize("seed", range(8))
def test_solver_finds_the_best_choice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.sort(rng.integers(1, 30, (5, 4)), axis=1) * 16
    costs = -np.sort(-rng.random((5, 4)), axis=1)
    budget = int(rng.integers(sizes[:, 0].sum(), sizes[:, -1].sum() + 1))
    chosen = solve(costs, sizes, budget)
    items = np.arange(5)
    assert sizes[items, chosen].sum() <= budget
    assert np.isclose(costs[items, chosen].sum(), brute_force(costs, sizes, budget))


def test_coarse_units_keep_the_budget_and_spend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    sizes = np.sort(rng.integers(1000, 100_000, (30, 5)), axis=1)
    costs = -np.sort(-rng.random((30, 5)), axis=1)
    budget = int(sizes.mean(axis=1).sum())
    items = np.arange(30)
    exact = costs[items, solve(costs, sizes, budget)].sum()
    monkeypatch.setattr(knapsack, "MAX_UNITS", 1 << 9)
    chosen = solve(costs, sizes, budget)
    assert sizes[items, chosen].sum() <= budget
    # 30 sizes rounded up by half a unit each: some 3 % of 512 units
    assert exact <= costs[items, chosen].sum() <= 1.1 * exact
    more = sizes - sizes[items, chosen][:, None]
    left = budget - sizes[items, chosen].sum()
    assert not ((more <= left) & (costs < costs[items, chosen][:, None])).any()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="smallest formats take 30 bytes, and the budget is 29"):
        solve(np.zeros((3, 2)), np.full((3, 2), 10), 29)
    infinite = np.array([[np.inf, 1.0]])
    assert solve(infinite, np.array([[1, 5]]), 5).tolist() == [1]


def test_errors_are_those_of_the_outputs(model: Path) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(50, 64)) * np.exp(rng.normal(size=64))
    found = allocate(model, 5.0, ["q4"], importance={Q: x.T @ x})
    with open_weights(model) as file:
        w = file.array(resolve(model).spec.checkpoint_name(Q)).astype(np.float64)
    squares = (x.T @ x).astype(np.float32).diagonal()
    error = nk.dequantize(nk.quantize(w, "q4", importance=squares)) - w
    wanted = np.square(x @ error.T).sum() / np.square(x @ w.T).sum()
    # moments are float32: 2**-24 of sums that partly cancel
    assert np.isclose(found.errors[Q]["q4_b32t1a"], wanted, rtol=1e-4)


def test_budgets_are_met_to_the_byte_and_more_bits_lose_less(model: Path) -> None:
    found = allocate(model, [3.5, 5.0, 8.5], CANDIDATES, quantizer="reference")
    shapes = {n: s for n, s in resolve(model).spec.tensor_shapes().items() if is_quantized(n, s)}
    for allocation in found:
        counted = sum(
            nk.quantize(np.zeros(shapes[name], np.float32), format).nbytes
            for name, format in allocation.formats.items()
        )
        assert counted == allocation.n_bytes <= allocation.budget_bytes
        assert set(allocation.formats) == set(shapes)
    assert found[0].predicted > found[1].predicted > found[2].predicted
    assert set(found[2].formats.values()) == {"q8_b32t2"}
    for options, message in (
        ({"bits_per_weight": 2.9}, "bits_per_weight=2.9: the smallest formats take"),
        ({"bits_per_weight": -1}, r"must lie in 0\.\.64"),
        ({"candidates": ["q2", "q2_b32t1b"]}, "each once"),
        ({"candidates": ["q9"]}, "unknown format 'q9'"),
        ({"sensitivity": "kld"}, "needs a text"),
        ({"sensitivity": "x"}, "must be 'error' or 'kld'"),
    ):
        with pytest.raises(UsageError, match=message):
            allocate(model, **{"bits_per_weight": 4.0, "candidates": CANDIDATES, **options})


def test_policies_say_the_format_of_each_matrix(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    write_policy(path, {DOWN: "q8", "*": "q4"}, {"name": 'a "b"\n', "bits_per_weight": 4.5})
    formats = weight_formats(path)
    assert formats is not None
    assert formats.facts == {"name": 'a "b"\n', "bits_per_weight": 4.5}
    assert formats.of(DOWN, (64, 192)) == "q8_b32t2"
    assert formats.of(Q, (256, 64)) == "q4_b32t1a"
    assert formats.of("embed.weight", (101, 64)) is None
    done = nbflow.quantize_checkpoint(model, tmp_path / "out", path)
    stored = {own: t.format for t in done.tensors for own in t.ours}
    assert (stored[DOWN], stored[Q], stored["embed.weight"]) == ("q8_b32t2", "q4_b32t1a", "f32")
    ids = [1, 5, 9]
    with nbflow.load(done.path) as written, nbflow.load(model, weights=path) as loaded:
        assert np.array_equal(written.logits(ids), loaded.logits(ids))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[formats]\n'*' = 'q4'\n'*.q.*' = 'q8'", "is for no matrix that an earlier one"),
        ("[formats]\n'*norm*' = 'q4'", "is for no matrix"),
        ("[formats]\n'*' = 'q9'", r"p.toml: \*: unknown format 'q9'"),
        ("[formats]\n'*' = 4", "must be text"),
        ("[format]\n'*' = 'q4'", r"knows tables \[formats\] and \[policy\] and .* min_el"),
        ("min_elements = -1\n[formats]\n'*' = 'q4'", "min_elements must be a whole number"),
        ("policy = 3\n[formats]\n'*' = 'q4'", r"\[policy\] must be a table"),
        ("", r"needs a table \[formats\]"),
        ("[formats", "invalid TOML"),
    ],
)
def test_wrong_policies(model: Path, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        nbflow.load(model, weights=path)
    with pytest.raises(UsageError, match=message):
        nbflow.quantize_checkpoint(model, tmp_path / "x", path)


def test_matrices_in_one_tensor_get_one_format(tmp_path: Path) -> None:
    fused = Path(__file__).parents[1] / "golden" / "families" / "phi3"
    formats = WeightFormats((("*.attn.q.weight", "q8_0"), ("*", "q4_0")), {})
    with pytest.raises(UsageError, match="holds matrices that the policy gives different formats"):
        nbflow.quantize_checkpoint(fused, tmp_path / "x", formats, dry_run=True)
    spec = resolve(fused).spec
    program = fuse(build(spec))
    with open_weights(fused) as file:  # in memory they are matrices of their own
        held = WeightLoader(program, file, formats)
    qkv = next(i for i, op in enumerate(program.ops) if op.weights[:1] == (Operand(Q),))
    assert [m.format.name for m in held.operands[qkv]] == ["q8_0", "q4_0"]


def command(capsys: Any, *words: object, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(["quantize", *map(str, words)])
    out, err = capsys.readouterr()
    assert end.value.code == code, err
    return err if code else out


def test_command_chooses_checks_and_writes(tmp_path: Path, capsys: Any) -> None:
    policy = tmp_path / "p.toml"
    words = ["tiny_python", "--bits-per-weight", 3.5, "--formats", "q2,q3,q4", "--policy", policy]
    words += ["--quantizer", "reference", "--check", "--tokens", 256, "-o", tmp_path / "out"]
    facts = json.loads(command(capsys, *words, "--json"))["allocation"]
    assert facts["stored_bytes"] <= facts["budget_bytes"] == int(3.5 * facts["n_weights"] / 8)
    found = facts["check"]
    assert found["measured"]["kld"] < found["single_formats"]["q2_b32t1b"]["kld"]
    assert set(found["single_formats"]) == {"q2_b32t1b"}
    formats = weight_formats(policy)
    assert formats is not None
    assert dict(formats.patterns) == facts["formats"]
    with open_weights(tmp_path / "out") as file:
        spec = resolve(tmp_path / "out").spec
        stored = {n: file.dtype(spec.checkpoint_name(n)) for n in facts["formats"]}
    assert stored == facts["formats"]
    for wrong, message in (
        ([], "give --to FORMAT, or --bits-per-weight B"),
        (["--to", "q4", "--bits-per-weight", 3], "give --to FORMAT, or"),
        (["--bits-per-weight", 3], "needs formats to choose from"),
        (["--to", "q4", "--formats", "q2"], "--formats is for --bits-per-weight"),
        (["--to", "q4", "--check"], "--check is for --bits-per-weight"),
        (["--to", "q4", "--tokens", 9], "are for --sensitivity kld and --check"),
        ([*words[1:5], "--rule", "*=q4"], "does not go with --bits-per-weight"),
        ([*words[1:5], "--policy", policy], "p.toml: exists"),
    ):
        assert message in command(capsys, "tiny_python", "-o", tmp_path / "y", *wrong, code=2)
