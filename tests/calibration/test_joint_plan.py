"""Joint choice of formats, cache and partition: sensitivities, brute force, command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import make_spec

from nbflow import cli
from nbflow.calibration.allocation import (
    Sensitivity,
    measure_sensitivity,
    plan_jointly,
    read_sensitivity,
)
from nbflow.calibration.allocation.divergence import DivergenceProbe
from nbflow.calibration.allocation.joint_plan import cache_pairs
from nbflow.planner import (
    CacheCurve,
    Device,
    Link,
    Machine,
    PlannedModel,
    Rates,
    RunConfig,
    Workload,
    predict,
)
from nbflow.quantization.policy import WeightFormats, is_quantized, weight_formats
from nbflow_kernels.errors import UsageError

FORMATS = ("q3_b32t1b", "q8_b32t2")
WORKLOAD = Workload(batch=2, prompt=16, generate=8)


def small_model() -> PlannedModel:
    return PlannedModel(make_spec(n_layers=1, intermediate_size=320, max_context=512))


def small_sensitivity(model: PlannedModel) -> Sensitivity:
    """Return losses that differ from matrix to matrix, at most 0.28 in all."""
    rng = np.random.default_rng(3)
    shapes = {n: (s[0], s[1]) for n, s in model.spec.tensor_shapes().items() if is_quantized(n, s)}
    errors = {m: dict(zip(FORMATS, (rng.uniform(0.01, 0.04), 1e-5), strict=True)) for m in shapes}
    return Sensitivity(
        shapes, errors, dict.fromkeys(shapes, 1.0),
        keys={"f16": 0.0, "q4_0": 0.01}, values={"f16": 0.0, "q4_0": 0.004},
    )  # fmt: skip


def machine(memory_bytes: float = 1e9) -> Machine:
    """Return two ranks for which bytes cost time."""
    device = Device("cpu", memory_bytes, 1e9, {"f32": 1e12}, op_s=1e-6, step_s=1e-5)
    return Machine("two", (device, device), 2, {"host": Link(1e-5, 1e9)})


def cached_machine() -> Machine:
    """Return two ranks whose caches keep a share of a step's weights that depends on the choice."""
    times = {
        "q3_b32t1b": ((4e-10, 1e-9), (5e-10, 1e-9)), "q8_b32t2": ((3e-10, 8e-10), (1.2e-9, 1.3e-9)),
    }  # fmt: skip
    device = dataclasses.replace(
        machine().devices[0],
        formats={f: {"f32": Rates((1, 8), c, m, m)} for f, (c, m) in times.items()},
        cached=CacheCurve((2e4, 6e4), (1.0, 0.0)), cached_bytes_per_s=9e9,
    )  # fmt: skip
    return dataclasses.replace(machine(), devices=(device, device))


def brute_force(
    model: PlannedModel, of: Machine, known: Sensitivity, max_kld: float
) -> tuple[float, int]:
    """Return the least time of a request, and the number of choices that meet the divergence."""
    least, n = float("inf"), 0
    for keys, values in itertools.product(known.keys, known.values):
        for chosen in itertools.product(FORMATS, repeat=len(known.shapes)):
            formats = dict(zip(known.shapes, chosen, strict=True))
            if known.weights_kld(formats) + known.kv_kld(keys, values) > max_kld:
                continue
            n += 1
            whole = dataclasses.replace(model, weights=WeightFormats(tuple(formats.items()), {}))
            found = predict(whole, "0&1", of, WORKLOAD, RunConfig(kv=f"{keys}/{values}"))
            if found.fits:
                least = min(least, found.request_s)
    return least, n


@pytest.mark.parametrize("max_kld", [0.03, 0.08])
def test_the_choice_is_as_fast_as_any_within_the_divergence(max_kld: float) -> None:
    model = small_model()
    known = small_sensitivity(model)
    found = plan_jointly(model, machine(), WORKLOAD, known, max_kld, partitions=["0&1"])
    least, n = brute_force(model, machine(), known, max_kld)
    assert 1 < n < 4 * 2 ** len(known.shapes)  # the limit decides
    assert found.kld <= max_kld
    # A loss is rounded up to a 65536th of the limit; no choice of two formats lies within that.
    assert found.prediction.request_s == pytest.approx(least, rel=1e-12)


def test_the_choice_counts_what_the_caches_keep() -> None:
    """Each matrix is charged what the caches keep of the whole; the best choice may differ."""
    model, of = small_model(), cached_machine()
    known = small_sensitivity(model)
    found = plan_jointly(model, of, WORKLOAD, known, 0.08, partitions=["0&1"])
    least, _ = brute_force(model, of, known, 0.08)
    assert found.kld <= 0.08
    # smaller formats leave more room to the others, which the search sees after its choice
    assert least <= found.prediction.request_s <= 1.02 * least


def test_memory_limits_the_choice() -> None:
    model = small_model()
    known = small_sensitivity(model)
    # decoding takes long where bytes cost nothing: only memory asks for fewer bytes
    slow = Device("cpu", 1e9, 1e15, {"f32": 1e12}, {"f32": 1e9})
    plenty = Machine("one", (slow,), 1)
    roomy = plan_jointly(model, plenty, WORKLOAD, known, 0.2)
    assert set(roomy.formats.values()) == {"q8_b32t2"}  # equal times: the least loss
    used = 1e9 - roomy.prediction.ranks[0].free_bytes
    tight = dataclasses.replace(
        plenty, devices=(dataclasses.replace(slow, memory_bytes=used - 20e3),)
    )
    found = plan_jointly(model, tight, WORKLOAD, known, 0.2)
    assert found.prediction.ranks[0].free_bytes >= 0
    assert found.kld <= 0.2
    none = dataclasses.replace(plenty, devices=(dataclasses.replace(slow, memory_bytes=1e4),))
    with pytest.raises(
        UsageError, match=r"fits into the memory of one; closest is partition '0', "
    ):
        plan_jointly(model, none, WORKLOAD, known, 0.2)


def test_wrong_limits_and_models() -> None:
    model = small_model()
    known = small_sensitivity(model)
    with pytest.raises(UsageError, match="max_kld must be positive, got 0"):
        plan_jointly(model, machine(), WORKLOAD, known, 0.0)
    with pytest.raises(UsageError, match=r"below what the candidates reach: 7e-05 in the weights"):
        plan_jointly(model, machine(), WORKLOAD, known, 1e-5)
    other = PlannedModel(make_spec(n_layers=1, intermediate_size=384))
    with pytest.raises(UsageError, match=r"sensitivities are of another model: layers\.0\.ffn"):
        plan_jointly(other, machine(), WORKLOAD, known, 0.1)


def test_pairs_of_caches_are_those_that_pay() -> None:
    known = Sensitivity(
        {}, {}, {},
        keys={"f16": 0.0, "q8_0": 0.001, "q4_0": 0.02, "q4_1": 0.03},
        values={"f16": 0.0, "q4_0": 0.004},
    )  # fmt: skip
    # q4_1 takes more bytes than q4_0 and loses more
    assert list(cache_pairs(known, 0.025)) == [
        ("q4_0", "q4_0"), ("q8_0", "q4_0"), ("f16", "q4_0"), ("q8_0", "f16"), ("f16", "f16"),
    ]  # fmt: skip
    assert all(known.kv_kld(*pair) < 0.003 for pair in cache_pairs(known, 0.003))


def test_mixtures_are_interpolated_between_formats() -> None:
    shapes = {"layers.0.a.weight": (4, 32), "layers.0.b.weight": (4, 32)}
    errors = {m: {"q2_k": 0.1, "q4_k": 0.01, "q8_0": 1e-4} for m in shapes}
    known = Sensitivity(
        shapes, errors, {"layers.0.a.weight": 1.0, "layers.0.b.weight": 3.0},
        uniform={"q2_k": 0.8, "q4_k": 0.05, "q8_0": 4e-4},
    )  # fmt: skip
    for format, kld in known.uniform.items():
        assert known.weights_kld(dict.fromkeys(shapes, format)) == pytest.approx(kld)
    mixed = known.weights_kld(dict(zip(shapes, ("q2_k", "q4_k"), strict=True)))
    # loss 0.13 between 0.04 and 0.4, on logarithmic scales
    between = np.interp(np.log(0.13), np.log([0.04, 0.4]), np.log([0.05, 0.8]))
    assert mixed == pytest.approx(np.exp(between))
    assert known.largest_added_loss(mixed) == pytest.approx(0.13)
    assert known.largest_added_loss(8.0) == pytest.approx(4.0)  # the ratio at the end holds


def test_files_of_sensitivities(tmp_path: Path) -> None:
    known, path = small_sensitivity(small_model()), tmp_path / "s.json"
    facts = {"model": "m", "quantizer": "search", "n_tokens": 256, "window": 64}
    known = dataclasses.replace(known, uniform=dict.fromkeys(FORMATS, 0.1), facts=facts)
    known.write(path)
    assert read_sensitivity(path) == known
    assert list(known.restricted(["q8_b32t2"], ["f16"]).keys) == ["f16"]
    with pytest.raises(UsageError, match="lacks q4_k; it has weights q3_b32t1b, q8_b32t2 and"):
        known.restricted(["q4_k"], None)
    content = json.loads(path.read_text())
    first = next(iter(known.shapes))
    for name, value, message in (
        ("version", 7, "not a sensitivity file of version 1"),
        ("slopes", {first: float("nan")}, f"slopes: {first}: must be at least 0 and finite"),
        ("slopes", {first: "1"}, f"slopes: {first}: must be a number, got '1'"),
        ("errors", {first: 2}, f"errors: {first}: must be a table, got 2"),
        ("shapes", {first: 3}, f"shapes: {first}: must be rows and columns"),
        ("shapes", {first: [3, 0]}, f"shapes: {first}: must be rows and columns"),
        ("slopes", {}, "tables differ"),
        ("facts", {"model": "m"}, "facts: quantizer: must be text in quotes, got None"),
    ):
        path.write_text(json.dumps({**content, name: value}))
        with pytest.raises(UsageError, match=message):
            read_sensitivity(path)


def test_measured_divergences_are_those_of_the_formats() -> None:
    probe = DivergenceProbe("tiny_python", n_tokens=128, window=64)
    one_matrix = "layers.1.ffn.down.weight"
    known = measure_sensitivity("tiny_python", ["q3"], ["q4_0"], probe, quantizer="reference")
    only = probe.measure(
        weights=WeightFormats(((one_matrix, "q3_b32t1b"),), {}), quantizer="reference"
    ).kld
    assert known.slopes[one_matrix] * known.errors[one_matrix]["q3_b32t1b"] == pytest.approx(only)
    keys = probe.measure(kv="q4_0/f32").kld
    assert known.keys == {"q4_0": pytest.approx(keys)}
    assert known.uniform["q3_b32t1b"] > 5 * only
    with pytest.raises(UsageError, match="quantizer 'awq' changes matrices"):
        measure_sensitivity("tiny_python", ["q3"], ["f16"], probe, quantizer="awq+search")


def command(capsys: Any, *words: object, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", *map(str, words)])
    out, err = capsys.readouterr()
    assert end.value.code == code, err
    return err if code else out


def test_command_plans_and_writes_the_sweep_that_checks_it(tmp_path: Path, capsys: Any) -> None:
    from nbflow_experiments.config.sweep_file import load_sweep

    losses, out = tmp_path / "losses.json", tmp_path / "plan"
    words = ["tiny_python", "--max-kld", 0.05, "--vram", "1,1", "--tokens", 256, "--batch", 2]
    words += ["--prompt", 64, "--generate", 16, "--sensitivity", losses, "--formats", "q3,q8"]
    words += ["--kv-formats", "q4_0,q8_0", "--quantizer", "reference"]
    shown = command(capsys, *words, "-o", out)
    assert "rates of rtx4090 are assumed" in shown
    facts = json.loads(command(capsys, *words, "--json"))  # from the file of losses
    assert facts["predicted_kld_nats"] <= 0.05
    formats = weight_formats(out / "policy.toml")
    assert formats is not None
    assert (
        dict(formats.patterns)
        == facts["formats"]
        == json.loads((out / "plan.json").read_text())["formats"]
    )
    assert [r["device"] for r in facts["ranks"]] == ["GeForce RTX 4090"] * len(facts["ranks"])
    sweep = tomllib.loads((out / "check.toml").read_text())
    assert sweep["settings"]["partition"] == facts["partition"]
    assert sweep["settings"]["device"] == "cuda"
    assert str(out / "policy.toml") in sweep["axes"]["weights"]
    assert len(load_sweep(out / "check.toml").points) == len(sweep["axes"]["weights"])
    for wrong, message in (
        (["--weights", "q4", "--max-kld", 1], "name candidates with --formats"),
        (["--batch", "1,8", "--max-kld", 1], "plans for one --batch, got '1,8'"),
        ([*words[1:], "--tokens", 512], "was measured with --tokens 256, got 512"),
        ([*words[1:], "--quantizer", "hqq"], "was measured with --quantizer reference, got hqq"),
        (["--shares", "memory", "--max-kld", 1], "--shares is for a --partition without"),
        (["--vram", "24,x", "--max-kld", 1], "GiB of each rank, e.g. 24,24, got 'x'"),
        (["--vram", "24", "--ranks", 2], "--ranks 2 and --vram 24 disagree"),
        (["--machine", "rtx4090", "--formats", "q4"], "--formats is for --max-kld X; give both"),
        (["--max-kld", 1], "or give the memory of each rank: --vram 24,24"),
    ):
        assert message in command(capsys, "tiny_python", *wrong, code=2)
