"""Device memory: the plan equals the allocation; refusal of what does not fit.

The emulator counts every byte that is allocated on its device, and apart from them those of the
host's memory that kernels use over the bus.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbflow
from nbflow.distributed.device import find_device
from nbflow.planner.memory_plan import plan_memory
from nbflow_kernels.errors import UsageError

pytestmark = pytest.mark.compiler

FOLDER = Path(__file__).parents[1] / "golden" / "families"
IDS = np.arange(3, 6)
ON_HOST: dict[str, Any] = {"kv_host_percent": 50, "embeddings_on_host": True}
OPTIONS: dict[str, Any] = {"kv": "f32", "max_step_tokens": 9}


def logits(name: str, **options: Any) -> np.ndarray:
    encoder = {"encoder_ids": [5, 9, 7, 3]} if name == "t5" else {}
    with nbflow.load(FOLDER / name, **{**OPTIONS, **options}) as model:
        return model.logits(IDS, **encoder)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama31", "t5"])
def test_what_lies_in_the_hosts_memory_changes_no_bit(name: str, cupy: Any) -> None:
    expected = logits(name, device="emulator")
    cupy.reset()
    assert np.array_equal(logits(name, device="emulator", **ON_HOST), expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama31", {}),
        ("llama31", {"kv": "f16/q8_0", **ON_HOST}),
        ("mixtral", {"weights": "q8_0", **ON_HOST}),
        ("deepseek_v3", ON_HOST),
    ],
)
def test_plan_within_two_percent(name: str, options: dict[str, Any], cupy: Any) -> None:
    """Bytes that the emulator's device holds after steps of an engine.

    Beyond the plan are the numbers of a step, the division of attention's work and what products
    share, some 100 kB whatever the model's size: there is room for 400 contexts to compare with.
    """
    options = {**OPTIONS, **options, "device": "emulator"}
    plan = plan_memory(FOLDER / name, **options, max_sequences=9)
    (rank,) = plan.ranks
    factor = 400 // plan.max_sequences
    room = rank.kv_bytes * factor
    plan = plan_memory(FOLDER / name, **options, max_sequences=9, kv_bytes=room)
    (rank,) = plan.ranks
    assert rank.kv_bytes == room
    with (
        nbflow.load(FOLDER / name, **options) as model,
        nbflow.LLMEngine(model, max_sequences=9, kv_bytes=room) as engine,
    ):
        engine.submit(model.make_request([1, 2, 3], 2, "greedy", 0, True)).result(300)
        (held,) = model.memory()
        counted = cupy.memory_bytes()
    assert counted["mapped_bytes"] == rank.host_bytes == held["host_bytes"]
    assert held["vram_before_bytes"] + held["vram_bytes"] == counted["device_bytes"]
    assert counted["device_bytes"] == pytest.approx(rank.device_bytes, rel=0.02)
    for key in ("weight_bytes", "kv_bytes", "workspace_bytes"):
        assert held[key] == pytest.approx(getattr(rank, key), rel=0.02)


@pytest.mark.parametrize(
    ("name", "activations", "kv_bytes"),
    [("gpt_oss_floats", "f32", 400_000), ("llama31", "bf16", 30_000)],
)
def test_workspaces_of_products_are_planned(
    name: str, activations: str, kv_bytes: int, cupy: Any
) -> None:
    """Scratch of experts with biases, which do not run as fused kernels; panels of bfloat16.

    The plan leaves out some constants: sinks, factors of tokens.
    """
    options = {**OPTIONS, "device": "emulator", "max_step_tokens": 6, "activations": activations}
    limits = {"max_sequences": 1, "kv_bytes": kv_bytes}
    (rank,) = plan_memory(FOLDER / name, **options, **limits).ranks
    with (
        nbflow.load(FOLDER / name, **options) as model,
        nbflow.LLMEngine(model, **limits) as engine,
    ):
        engine.submit(model.make_request(list(range(1, 7)), 2, "greedy", 0, True)).result(300)
        (held,) = model.memory()
    assert held["step_bytes"] == pytest.approx(rank.step_bytes, rel=0.01)


def test_a_cap_that_only_a_part_on_the_host_keeps(cupy: Any) -> None:
    """A device with what the plan states runs the model; without its part on the host it cannot."""
    options = {**OPTIONS, "device": "emulator", "kv": "f16/q8_0"}
    limits = {"max_sequences": 9, "kv_bytes": 8_000_000}
    (rank,) = plan_memory(FOLDER / "llama31", **options, **limits, **ON_HOST).ranks
    (whole,) = plan_memory(FOLDER / "llama31", **options, **limits).ranks
    cap = round(1.02 * rank.device_bytes)
    assert whole.device_bytes > 1.5 * cap

    def run(**place: Any) -> list[int]:
        cupy.reset(memory_bytes=cap)
        with (
            nbflow.load(FOLDER / "llama31", **options, **place) as model,
            nbflow.LLMEngine(model, **limits) as engine,
        ):
            request = model.make_request([3, 9, 4], 2, "greedy", 0, True)
            return engine.submit(request).result(300).ids

    assert len(run(**ON_HOST)) == 2
    with pytest.raises(UsageError, match="the key/value cache asked for"):
        run()


def test_no_room_is_an_error_that_names_what_asked_for_how_much(cupy: Any) -> None:
    cupy.reset(memory_bytes=40_000)
    with pytest.raises(UsageError, match=r"emulator: the weights asked for [\d,]+ bytes; it holds"):
        nbflow.load(FOLDER / "llama31", device="emulator", **OPTIONS)


def test_no_room_for_an_engine_leaves_the_model_as_it_was(cupy: Any) -> None:
    cupy.reset(memory_bytes=3_000_000)
    with nbflow.load(FOLDER / "llama31", device="emulator", **OPTIONS) as model:
        expected = model.generate([3, 9, 4], 3, ignore_eos=True).ids
        words = r"emulator: the key/value cache asked for [\d,]+ bytes; it holds"
        request = model.make_request([3, 9, 4], 3, "greedy", 0, True)
        with (
            nbflow.LLMEngine(model, max_sequences=2, kv_bytes=5_000_000) as engine,
            pytest.raises(UsageError, match=words),
        ):
            engine.submit(request).result(300)
        assert model.generate([3, 9, 4], 3, ignore_eos=True).ids == expected
        with nbflow.LLMEngine(model, max_sequences=2, kv_bytes=100_000) as engine:
            handle = engine.submit(model.make_request([3, 9, 4], 3, "greedy", 0, True))
            assert handle.result(300).ids == expected


def test_first_layers_on_the_host(cupy: Any) -> None:
    options = {**OPTIONS, "device": "emulator", "cpu_layers": 1}
    with nbflow.load(FOLDER / "llama31", **options) as model:
        assert model.plan.partition == "0;1"  # of two layers
        assert [engine.executor.device.name for engine in model.workers] == ["cpu", "emulator"]
        found = model.logits(IDS)
    # as the CPU's logits, up to float32 sums in another order
    assert np.abs(found - logits("llama31")).max() < 4e-6 * np.abs(found).max()
    plan = plan_memory(FOLDER / "llama31", **options)
    assert plan.devices == ("cpu", "emulator")
    assert plan.host_bytes == plan.ranks[0].total_bytes
    with nbflow.load(FOLDER / "llama31", **{**options, "cpu_layers": 2}) as model:
        assert [engine.executor.device.name for engine in model.workers] == ["cpu"]
    with pytest.raises(UsageError, match="cpu_layers must be at most 2"):
        nbflow.load(FOLDER / "llama31", **{**options, "cpu_layers": 3})
    with pytest.raises(UsageError, match="cpu_layers=1 needs one rank"):
        nbflow.load(FOLDER / "llama31", **options, partition="0;1")


def test_mapped_arrays_are_used_by_kernels_where_they_are(cupy: Any) -> None:
    far = find_device("emulator").for_purpose("a test").mapped()
    before = cupy.memory_bytes()
    table = far.put(np.arange(12, dtype=np.float32).reshape(3, 4))
    pages = far.zeros((2, 3), np.float16)
    after = cupy.memory_bytes()
    assert after["mapped_bytes"] - before["mapped_bytes"] == table.nbytes + pages.nbytes
    assert after["device_bytes"] == before["device_bytes"]
    np.testing.assert_array_equal(table.get(), np.arange(12).reshape(3, 4))
    del table, pages
    assert cupy.memory_bytes()["mapped_bytes"] == before["mapped_bytes"]
