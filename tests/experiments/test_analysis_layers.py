"""Errors of layers, attribution and cache formats, against runs op by op in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_models import write_checkpoint, write_llama

import nbflow
import nbflow_kernels as nk
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.program import build
from nbflow_experiments.analysis import (
    Change,
    Format,
    analysis_windows,
    attribution,
    figures,
    kv_errors,
    layer_errors,
)
from nbflow_experiments.analysis.treatments import Checkpoint
from nbflow_experiments.figure_style import NotDrawn
from nbflow_experiments.scoring.score_text import model_reference, score_text
from nbflow_experiments.scoring.windows import Window
from nbflow_kernels import QuantTensor
from nbflow_kernels.errors import UsageError

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
WINDOWS = [[1, 5, 9, 2, 7, 11, 30], [3, 3, 8, 40, 17]]
READ = [window[:-1] for window in WINDOWS]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("analysis") / "llama"
    write_llama(folder, n_layers=2)
    return folder


class Exactly:
    """Replaces the matrices that it names and keeps the others."""

    def __init__(self, label: str, changed: dict[str, Callable[[np.ndarray], np.ndarray]]) -> None:
        self.label = label
        self.changed = changed

    def encode(self, name: str, matrix: np.ndarray) -> QuantTensor:
        change = self.changed.get(name, lambda same: same)
        return nk.quantize(change(matrix), "f32")


def traced(model: Path, treatment: Exactly | None = None) -> dict[str, np.ndarray]:
    """Return the residual streams, inputs of the matrices and logits, float64, of all windows."""
    found: dict[str, list[np.ndarray]] = {}
    with Checkpoint(model) as checkpoint:
        program = build(checkpoint.spec)
        weights = WeightLoader(program, checkpoint.file, "f32", joined=False)
        for i, op in enumerate(program.ops):
            if treatment is not None and op.kind == "linear" and op.layer is not None:
                name = op.weights[0].name
                weights.operands[i] = (treatment.encode(name, checkpoint.matrix(name)),)
    last = {op.layer: op for op in program.ops if op.layer is not None}
    values: dict[str, np.ndarray] = {}

    def trace(op, value):
        if op.kind == "linear" and op.layer is not None:
            found.setdefault(op.weights[0].name, []).append(values[op.inputs[0]])
        values[op.out] = value.copy()
        if op is last.get(op.layer):
            found.setdefault(f"x{op.layer}", []).append(value.copy())

    for window in READ:
        logits = ReferenceExecutor(program, weights, trace).logits(np.asarray(window))
        found.setdefault("logits", []).append(logits)
    return {name: np.concatenate(rows) for name, rows in found.items()}


def relative(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def scaled(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda matrix: (matrix * np.float32(factor)).astype(np.float32)


DOWN, UP = "layers.0.ffn.down.weight", "layers.1.ffn.up.weight"
PLANTED = Exactly("planted", {DOWN: scaled(1.25), UP: scaled(0.5)})


@pytest.fixture(scope="module")
def planted(llama: Path):
    return layer_errors(llama, [PLANTED], WINDOWS)


def test_errors_of_the_residual_stream(llama: Path, planted) -> None:
    exact, both = traced(llama), traced(llama, PLANTED)
    first = traced(llama, Exactly("", {DOWN: PLANTED.changed[DOWN]}))
    table = planted.layers.set_index("layer")
    # float32 runs of a model against float64: 1e-5 of errors of a few per cent and more
    close = {"rel": 1e-4}
    assert table.cumulative_error[0] == pytest.approx(relative(first["x0"], exact["x0"]), **close)
    assert table.isolated_error[0] == pytest.approx(table.cumulative_error[0], rel=1e-6)
    assert table.cumulative_error[1] == pytest.approx(relative(both["x1"], exact["x1"]), **close)
    second = traced(llama, Exactly("", {UP: PLANTED.changed[UP]}))
    alone = relative(second["x1"], exact["x1"])
    assert table.isolated_error[1] == pytest.approx(alone, **close)
    lost = np.linalg.norm(first["x0"] - exact["x0"]), np.linalg.norm(second["x1"] - exact["x1"])
    independent = np.hypot(*lost) / np.linalg.norm(exact["x1"])
    assert table.independent_error[1] == pytest.approx(independent, **close)
    assert table.amplification[1] == table.cumulative_error[1] / table.independent_error[1]
    assert table.growth[1] == table.cumulative_error[1] / table.cumulative_error[0]
    update = np.linalg.norm(exact["x1"] - exact["x0"])
    assert table.isolated_update_error[1] == pytest.approx(lost[1] / update, **close)
    tokens = np.linalg.norm(both["x1"] - exact["x1"], axis=1) / np.linalg.norm(exact["x1"], axis=1)
    assert table.cumulative_token_median[1] == pytest.approx(np.median(tokens), **close)
    assert planted.token_counts["planted"].sum(axis=1).tolist() == [len(tokens)] * 2
    cosine = np.sum(both["x1"] * exact["x1"]) / np.linalg.norm(both["x1"])
    assert table.cosine[1] == pytest.approx(cosine / np.linalg.norm(exact["x1"]), **close)


def test_divergence_of_the_whole_model(llama: Path, planted) -> None:
    exact, both = traced(llama)["logits"], traced(llama, PLANTED)["logits"]
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (exact, both))
    kld = np.mean(np.sum(np.exp(p) * (p - q), axis=1))
    # the divergence sums float32 exponentials of float32 logits: good to 1e-6 nat
    assert planted.models.kld_mean_nats[0] == pytest.approx(kld, abs=2e-6)
    targets = np.concatenate([window[1:] for window in WINDOWS])
    rows = np.arange(len(targets))
    shift = np.mean(p[rows, targets] - q[rows, targets])
    assert planted.models.nll_difference_mean_nats[0] == pytest.approx(shift, abs=2e-6)


def test_errors_of_the_products(llama: Path) -> None:
    exact = traced(llama)
    quantized = Format("q3", "reference")
    rows = layer_errors(llama, [quantized], WINDOWS).modules.set_index("tensor")
    assert len(rows) == 14
    with Checkpoint(llama) as checkpoint:
        for name in ("layers.0.attn.v.weight", "layers.1.attn.o.weight", DOWN, UP):
            w = checkpoint.matrix(name)
            e = nk.dequantize(quantized.encode(name, w)).astype(np.float64) - w
            x = exact[name]
            output = np.linalg.norm(x @ e.T) / np.linalg.norm(x @ w.T)
            assert rows.output_error[name] == pytest.approx(output, rel=1e-4), name
            weight = np.linalg.norm(e) / np.linalg.norm(w)
            assert rows.weight_error[name] == pytest.approx(weight, rel=1e-6)
            assert rows.gain[name] == rows.output_error[name] / rows.weight_error[name]
            assert rows.input_rms[name] == pytest.approx(np.sqrt(np.mean(x**2)), rel=1e-5)


def test_products_of_experts_count_the_tokens_they_get(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    config = json.loads((FAMILIES / "mixtral" / "config.json").read_text()) | shape
    write_checkpoint(tmp_path / "model", config)
    double = Exactly("double", {})
    double.encode = lambda name, matrix: nk.quantize(2 * matrix, "f32")  # type: ignore[method-assign]
    found = layer_errors(tmp_path / "model", [double], WINDOWS)
    gates = found.modules[found.modules.kind == "moe.gate"]
    assert len(gates) == config["num_hidden_layers"]
    # an error as large as the weights, whatever the inputs; the router is not quantized
    assert np.allclose(found.modules.output_error, 1, rtol=1e-6)
    assert "router" not in set(found.modules.kind)
    parts = attribution(tmp_path / "model", [double], WINDOWS, by=["tensor"], complement=False)
    assert parts.units.unit.str.contains("layers.0.moe.gate").sum() == 1


# ---- attribution ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts(llama: Path):
    return attribution(llama, [PLANTED], WINDOWS)


def test_parts_of_a_planted_error(llama: Path, parts) -> None:
    table = parts.units.set_index(["by", "unit"])
    alone = {}
    for name in (DOWN, UP):
        one = Exactly("one", {name: PLANTED.changed[name]})
        alone[name] = layer_errors(llama, [one], WINDOWS).models.kld_mean_nats[0]
    whole = layer_errors(llama, [PLANTED], WINDOWS).models.kld_mean_nats[0]
    kld = table.kld_mean_nats
    for name, unit in ((DOWN, ("layer", "layers.0")), (UP, ("layer", "layers.1"))):
        assert kld["tensor", name] == alone[name]
        assert kld[unit] == alone[name]
        assert kld["kind", name.split(".")[3]] == alone[name]
    untouched = table[~table.index.get_level_values(1).isin([DOWN, UP])].loc["tensor"]
    assert (untouched.kld_mean_nats == 0).all()
    assert (untouched[untouched.counted].kld_saved_mean_nats == 0).all()
    # without one of two changes the other is left
    saved = table.kld_saved_mean_nats
    assert saved["tensor", DOWN] == pytest.approx(whole - alone[UP], abs=1e-12)
    assert saved["tensor", UP] == pytest.approx(whole - alone[DOWN], abs=1e-12)
    assert table.kld_share["tensor", UP] == pytest.approx(
        alone[UP] / (alone[UP] + alone[DOWN]), rel=1e-9
    )
    for row in parts.sums.itertuples():
        assert row.kld_mean_nats == whole
        assert row.kld_sum_nats == pytest.approx(alone[UP] + alone[DOWN], rel=1e-12)
        assert row.kld_interaction_nats == pytest.approx(whole - row.kld_sum_nats, abs=1e-12)
        assert row.additivity == pytest.approx(row.kld_sum_nats / whole)
    assert parts.sums.units.tolist() == [14, 2, 7]


def test_small_errors_add_up(llama: Path) -> None:
    """Changes of the log probabilities to first order: their sum is the whole's."""
    rng = np.random.default_rng(0)

    def noisy(matrix: np.ndarray) -> np.ndarray:
        return (matrix * (1 + 1e-3 * rng.standard_normal(matrix.shape))).astype(np.float32)

    with Checkpoint(llama) as checkpoint:
        names = [n for n in checkpoint.spec.tensor_shapes() if n.endswith("ffn.down.weight")]
        fixed = {name: noisy(checkpoint.matrix(name)) for name in names}
    small = Exactly("small", {name: lambda _, n=name: fixed[n] for name in names})
    sums = attribution(llama, [small], WINDOWS, by=["tensor"], complement=False).sums.iloc[0]
    # the remainder is second order, a thousandth; logits are rounded to 6e-8
    assert sums.nll_difference_sum_nats == pytest.approx(
        sums.nll_difference_mean_nats, rel=0.02, abs=2e-6
    )


def test_a_tied_embedding_is_swapped_by_use() -> None:
    windows = analysis_windows("tiny_python", tokens=128, window=64)
    found = attribution("tiny_python", ["q3h"], windows, by=["kind"], complement=False)
    table = found.units.set_index("unit")
    assert list(table.index) == [
        "embedding", "q", "k", "v", "o", "gate", "up", "down", "head",
    ]  # fmt: skip
    assert not table.counted["embedding"]
    assert not table.counted["head"]
    assert table.kld_mean_nats["embedding"] != table.kld_mean_nats["head"]
    assert table.stored_bytes["head"] == 2048 * 256 / 2  # 4 bits each
    assert table.kld_share.sum() == pytest.approx(1)


def test_the_whole_is_what_the_engine_gives() -> None:
    windows = analysis_windows("tiny_python", tokens=128, window=64)
    change = Change(Format("q4"), kv="q8_0")
    found = layer_errors("tiny_python", [change], windows)
    with (
        nbflow.load("tiny_python", weights="q4", kv="q8_0") as model,
        nbflow.load("tiny_python", weights="f32", kv="f32") as exact,
    ):
        asked = [Window(window, 1) for window in windows]
        scores = score_text(model, asked, reference=model_reference(exact))
    assert change.label == "q4, kv q8_0"
    assert Change(activations="int8").label == "int8 activations"
    assert found.models.kld_mean_nats[0] == pytest.approx(scores.divergence.mean(), rel=1e-5)
    shift = np.mean(scores.nll - scores.reference_nll)
    assert found.models.nll_difference_mean_nats[0] == pytest.approx(shift, abs=1e-6)


@pytest.mark.parametrize("family", ["falcon_40b", "deepseek_v2_lite"])
def test_families_are_cut_where_their_layers_end(family: str, tmp_path: Path) -> None:
    """Parallel residuals; latent attention, experts and a first dense layer."""
    config = json.loads((FAMILIES / family / "config.json").read_text())
    write_checkpoint(tmp_path / "m", config)
    found = layer_errors(tmp_path / "m", ["q8_0"], WINDOWS)
    logits = {}
    for weights in ("q8_0", "f32"):
        with nbflow.load(tmp_path / "m", weights=weights, kv="f32") as model:
            logits[weights] = np.concatenate([model.logits(ids) for ids in READ])
    kld = nk.kl_divergence(logits["f32"], logits["q8_0"]).mean()
    # matrices joined or not may be multiplied by other kernels: float32 rounding of the logits
    assert found.models.kld_mean_nats[0] == pytest.approx(kld, rel=1e-2)


def test_what_loses_nothing(llama: Path) -> None:
    found = layer_errors(llama, ["f32"], WINDOWS)
    assert (found.layers.cumulative_error == 0).all()
    assert found.layers.amplification.isna().all()
    assert (found.modules.output_error == 0).all()
    assert (found.models.kld_mean_nats == 0).all()
    parts = attribution(llama, ["f32"], WINDOWS, by=["layer"])
    assert (parts.units.kld_saved_mean_nats == 0).all()
    assert parts.units.kld_share.isna().all()
    assert parts.sums.additivity.isna().all()
    tables = {"layers": found.layers, "modules": found.modules, "units": parts.units}
    for draw in (figures.draw_layers, figures.draw_attribution):
        with pytest.raises(NotDrawn, match="lose"):
            draw(tables)


# ---- key/value cache --------------------------------------------------------------------------


def test_formats_of_the_cache(llama: Path) -> None:
    found = kv_errors(llama, ["q4"], WINDOWS)
    assert found.modules.empty
    both = found.models.set_index(["keys", "values"])
    assert both.bits.to_dict() == {("q4", "f32"): 18.5, ("f32", "q4"): 18.5, ("q4", "q4"): 5}
    table = found.layers.set_index(["keys", "values", "layer"])
    assert (table.keys_error["f32"] == 0).all()
    assert table.keys_error["q4", "f32", 0] > 0.03
    assert table.values_error["q4", "q4", 1] == table.values_error["f32", "q4", 1] > 0.03
    # keys alone and values alone are orthogonal causes of the attention's error, nearly
    for layer in (0, 1):
        keys, values, together = (
            table.attention_error[pair[0], pair[1], layer] for pair in both.index
        )
        assert together == pytest.approx(np.hypot(keys, values), rel=0.3)
    assert (table.isolated_error > 0).all()


# ---- wrong input ------------------------------------------------------------------------------


def test_wrong_input(llama: Path) -> None:
    for call, message in (
        (lambda: layer_errors(llama, [], WINDOWS), "one or more different changes"),
        (lambda: layer_errors(llama, ["q4"], []), "list of windows is empty"),
        (lambda: layer_errors(llama, ["q4"], [[1, 10**6, 2]]), "outside the vocabulary"),
        (lambda: attribution(llama, ["q4"], WINDOWS, by=["row"]), "unknown grouping 'row'"),
        (lambda: kv_errors(llama, ["q2_k"], WINDOWS), "cannot hold a key/value cache"),
        (lambda: layer_errors(FAMILIES / "t5", ["q4"], WINDOWS), "has an encoder"),
    ):
        with pytest.raises(UsageError, match=message):
            call()
