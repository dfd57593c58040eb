"""Planner predictions of a point: the ``predicted_`` columns next to the measured ones.

Where the setting ``machine`` names a description (`nbflow.planner.machine`), or is ``measured``,
each point gets the tokens per second that the roofline model gives for its partition, batch and
lengths, and the bytes that it counts.  ``measured`` describes the ranks that the point runs on by
measuring them, once for each number of ranks.  Outliers are not counted.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING

from nbflow.distributed.device import is_host
from nbflow_experiments.backend import MEASURED, Comm
from nbflow_experiments.measures.measure import MeasureResult, Reading
from nbflow_kernels.errors import UsageError

if TYPE_CHECKING:
    from nbflow.engine.llm import LLM
    from nbflow.planner import Machine
    from nbflow_experiments.config.points import Point

PROBE_BYTES = 64 << 20
"""Bytes read per rank and pass when the machine is measured."""


class Predictor:
    """Planner predictions of points; every rank calls it for the same points."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._measured: dict[tuple[int, ...], Machine] = {}

    def predict_point(self, point: Point, model: LLM) -> MeasureResult:
        """Predict a point; returns an empty result, with a warning, if that fails."""
        from nbflow.planner import Prediction, RunConfig, Workload, predict, stored_model
        from nbflow.spec import resolve

        config, numbers = point.config, model.plan.numbers
        name = str(config["machine"])
        try:
            if name == MEASURED and not is_host(str(config["device"])):
                raise UsageError("machine = 'measured' measures processors; describe the devices")
            machine = self._measure(numbers) if name == MEASURED else _described(name, numbers)
            planned = stored_model(
                model.spec,
                resolve(str(config["model"])).path,
                str(config["weights"]),
            )
            arithmetic = str(config["activations"])
            known = all(arithmetic in device.operations_per_s for device in machine.devices)
            setting = RunConfig(
                kv=str(config["kv"]),
                activations=arithmetic if known else None,
                all_reduce=str(config["all_reduce"]),
            )
            prompt, decode = int(config["prompt"]), int(config["decode"])
            workload = Workload(int(config["batch"]), prompt, decode)
            found: Prediction = predict(planned, model.plan.partition, machine, workload, setting)
        except UsageError as error:
            warnings.warn(f"nothing is predicted: {error}", stacklevel=1)
            return MeasureResult()
        weight_bytes = sum(rank.weight_bytes for rank in found.ranks)
        kv_bytes = sum(rank.kv_bytes for rank in found.ranks)
        return MeasureResult(
            [
                Reading("predicted_prefill_tokens_per_s", found.prefill_tokens_per_s, "token/s"),
                Reading("predicted_decode_tokens_per_s", found.decode_tokens_per_s, "token/s"),
                Reading("predicted_weight_bytes", float(weight_bytes), "byte"),
                Reading("predicted_kv_bytes", float(kv_bytes), "byte"),
                Reading("predicted_bubble_share", found.bubble, "1"),
                Reading("predicted_all_reduce_share", found.all_reduce_share, "1"),
            ]
        )

    def _measure(self, numbers: tuple[int, ...]) -> Machine:
        """Return the machine of these ranks, measured once; every rank calls it."""
        from nbflow.engine.load import load
        from nbflow.planner.measure_machine import measure_machine, measure_ranks

        if numbers not in self._measured:
            if self._comm.size == 1:
                machine = measure_machine(load, len(numbers), PROBE_BYTES)
            else:
                group = self._comm.split(numbers)
                machine = None if group is None else measure_ranks(load, group, PROBE_BYTES)
                machine = self._comm.bcast_object(machine, numbers[0])
            assert machine is not None
            self._measured[numbers] = _placed(machine, numbers)
        return self._measured[numbers]


def _described(name: str, numbers: tuple[int, ...]) -> Machine:
    from nbflow.planner import load_machine

    machine = load_machine(name)
    return machine.with_ranks(max(len(machine.devices), max(numbers) + 1))


def _placed(machine: Machine, numbers: tuple[int, ...]) -> Machine:
    """Reorder a machine's devices, measured in order of `numbers`, by rank."""
    devices = [machine.devices[0]] * (max(numbers) + 1)
    for device, number in zip(machine.devices, numbers, strict=True):
        devices[number] = device
    return dataclasses.replace(machine, devices=tuple(devices))
