"""Joint choice of weight formats, cache formats and partition for a machine and a divergence.

The fastest combination is chosen whose predicted divergence stays below a limit and whose ranks fit
into their memory:

1. Each partition is predicted with the fastest formats and the smallest cache.  No choice of
   formats is faster, so partitions are tried in the order of these bounds until the next bound
   is above the best choice.
2. For each pair of cache formats the divergence that is left goes to the matrices: the formats
   with the least time whose added loss is at most `Sensitivity.largest_added_loss`, by dynamic
   programming (`nbflow.calibration.allocation.knapsack`).  The time of a matrix is that of its
   products in the workload's steps on the slowest device of its stage (`Device.matrix_s`).
3. If a rank lacks memory, bytes get a price in the sum of times, which is bisected.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow.calibration.allocation.knapsack import MAX_UNITS, solve
from nbflow.calibration.allocation.sensitivity import Sensitivity
from nbflow.distributed import Plan, make_plan, split_replicas
from nbflow.options import Objective
from nbflow.planner import Machine, PlannedModel, Prediction, RunConfig, Workload, compare
from nbflow.planner.machine import Device
from nbflow.quantization.policy import WeightFormats
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.formats import kv_formats

PRICE_STEPS = 12
"""Bisections of the price of a byte."""


@dataclass(frozen=True)
class JointPlan:
    """Formats and partition with their predictions."""

    formats: dict[str, str]
    """Our name of a matrix -> format."""
    keys: str
    """Cache format of the keys."""
    values: str
    """Cache format of the values."""
    weights_kld: float
    """Predicted divergence of the weights, in nats per token."""
    kv_kld: float
    """Predicted divergence of the cache, in nats per token."""
    prediction: Prediction
    """Partition, speed and memory of each rank."""

    @property
    def kld(self) -> float:
        """Predicted divergence from the stored model, in nats per token."""
        return self.weights_kld + self.kv_kld

    @property
    def kv(self) -> str:
        """Cache formats as the option `kv` takes them."""
        return self.keys if self.keys == self.values else f"{self.keys}/{self.values}"


def plan_jointly(
    model: PlannedModel,
    machine: Machine,
    workload: Workload,
    sensitivity: Sensitivity,
    max_kld: float,
    *,
    config: RunConfig | None = None,
    objective: Objective = "throughput",
    partitions: Sequence[str] | None = None,
) -> JointPlan:
    """Choose weight formats, cache formats and a partition.

    Parameters
    ----------
    model : PlannedModel
        The model; its `weights` are replaced.
    machine : Machine
        Devices and links.
    workload : Workload
        Batch and lengths.
    sensitivity : Sensitivity
        Measured losses; its formats are the candidates.
    max_kld : float
        Largest predicted divergence from the stored model, in nats per token.
    config : RunConfig, optional
        Arithmetic and placement; its cache format is replaced.
    objective : {"latency", "throughput"}
        As for `nbflow.planner.best`.
    partitions : sequence of str, optional
        Partitions to choose from; all candidates of the machine's ranks by default.

    Raises
    ------
    UsageError
        If no format meets the divergence, or nothing that meets it fits into memory.
    """
    if not max_kld > 0:
        raise UsageError(f"max_kld must be positive, got {max_kld}")
    _check_matrices(model, sensitivity)
    pairs = list(cache_pairs(sensitivity, max_kld))
    _check_reachable(sensitivity, pairs, max_kld)
    search = _Search(model, machine, workload, sensitivity, config or RunConfig(), objective)
    found: JointPlan | None = None
    for bound, partition in search.bounds(pairs[0], partitions):
        if found is not None and bound >= search.cost(found.prediction):
            break
        for keys, values in pairs:
            chosen = search.choose(partition, keys, values, max_kld)
            if chosen is not None and (
                found is None or search.cost(chosen.prediction) < search.cost(found.prediction)
            ):
                found = chosen
    if found is None:
        raise UsageError(
            f"nothing with a divergence of at most {max_kld:g} nats per token fits into the memory "
            f"of {machine.name}{search.shortage()}; allow more (--max-kld), shorten the cache "
            "(--context), or use more memory"
        )
    return found


def cache_pairs(sensitivity: Sensitivity, max_kld: float) -> Iterator[tuple[str, str]]:
    """Yield pairs of cache formats below the divergence, the smallest first.

    Pairs that take more bytes than one that loses less are left out.
    """

    def n_bits(pair: tuple[str, str]) -> float:
        keys, values = kv_formats("/".join(pair))
        return float(keys.row_bytes(WIDTH) + values.row_bytes(WIDTH))

    pairs = itertools.product(sensitivity.keys, sensitivity.values)
    by_loss = sorted(pairs, key=lambda pair: (sensitivity.kv_kld(*pair), n_bits(pair)))
    kept: list[tuple[str, str]] = []
    for pair in by_loss:
        is_below = sensitivity.kv_kld(*pair) < max_kld
        if is_below and (not kept or n_bits(pair) < n_bits(kept[-1])):
            kept.append(pair)
    yield from reversed(kept)


WIDTH = 256
"""Head width at which bytes of cache formats are compared: whole blocks of all of them."""


def _check_matrices(model: PlannedModel, sensitivity: Sensitivity) -> None:
    """Raise unless the sensitivities are those of the model's matrices."""
    shapes = model.spec.tensor_shapes()
    for name, shape in sensitivity.shapes.items():
        if tuple(shapes.get(name, ())) != tuple(shape):
            raise UsageError(
                f"the sensitivities are of another model: {name} has shape {list(shape)} there and "
                f"{list(shapes.get(name, ())) or 'does not exist'} in {model.spec.name}; measure "
                "them again"
            )


def _check_reachable(
    sensitivity: Sensitivity, pairs: Sequence[tuple[str, str]], max_kld: float
) -> None:
    """Raise if the best formats are above the divergence."""
    finest = {m: min(errors, key=errors.__getitem__) for m, errors in sensitivity.errors.items()}
    weights = sensitivity.weights_kld(finest)
    cache = min(sensitivity.keys.values()) + min(sensitivity.values.values())
    if not pairs or weights + cache > max_kld:
        raise UsageError(
            f"a divergence of {max_kld:g} nats per token is below what the candidates reach: "
            f"{weights:.2g} in the weights and {cache:.2g} in the cache; add finer formats "
            "(--formats, --kv-formats) or allow more (--max-kld)"
        )


class _Search:
    """Search of one model and machine."""

    def __init__(
        self,
        model: PlannedModel,
        machine: Machine,
        workload: Workload,
        sensitivity: Sensitivity,
        config: RunConfig,
        objective: Objective,
    ) -> None:
        self._machine, self._workload, self._config = machine, workload, config
        self._sensitivity, self._objective = sensitivity, objective
        self._matrices = list(sensitivity.shapes)
        self._formats = list(next(iter(sensitivity.errors.values())))
        everything = tuple(("*", format) for format in self._formats)
        # borders of shards must be borders of blocks of whatever format a matrix gets
        self._model = dataclasses.replace(model, weights=WeightFormats(everything, {}))
        self._losses = np.array(
            [
                [sensitivity.slopes[m] * sensitivity.errors[m][f] for f in self._formats]
                for m in self._matrices
            ]
        )
        self._sizes = np.array(
            [
                [n_rows * nk.FORMATS[f].row_blocks(n_cols) * nk.FORMATS[f].block_bytes
                 for f in self._formats]
                for n_rows, n_cols in sensitivity.shapes.values()
            ]
        )  # fmt: skip
        self._lacking: list[tuple[int, str]] = []

    def cost(self, prediction: Prediction) -> float:
        """Return the seconds that are minimized."""
        return prediction.decode_s if self._objective == "latency" else prediction.request_s

    def shortage(self) -> str:
        """Return the memory that the closest choice lacks, as a clause."""
        if not self._lacking:
            return ""
        lacking, partition = min(self._lacking)
        return f"; closest is partition {partition!r}, where a rank lacks {lacking / 1e9:.2f} GB"

    def bounds(
        self, smallest: tuple[str, str], partitions: Sequence[str] | None
    ) -> list[tuple[float, str]]:
        """Return a lower bound of the cost of each partition, in ascending order."""
        found = []
        names = partitions or None
        possible, refused = compare(
            self._model, self._machine, self._workload, self._run(*smallest), names
        )
        if not possible:
            raise UsageError("; ".join(refused.values()))
        for each in possible:
            costs = []
            for sizes in (self._sizes.mean(axis=1), self._sizes.min(axis=1)):
                fastest = self._policy(self._times(each.partition, sizes).argmin(axis=1))
                costs.append(self.cost(self._predict(each.partition, fastest, *smallest)))
            found.append((min(costs), each.partition))
        return sorted(found)

    def choose(self, partition: str, keys: str, values: str, max_kld: float) -> JointPlan | None:
        """Return the fastest formats for a partition and a cache, or None if nothing fits."""
        known = self._sensitivity
        left = max_kld - known.kv_kld(keys, values)
        limit = known.largest_added_loss(left)
        # one unit is 1/65536 of the limit; losses are rounded up, so that the sum stays below it
        units = np.maximum(1, np.ceil(self._losses / limit * MAX_UNITS)).astype(np.int64)
        if units.min(axis=1).sum() > MAX_UNITS:
            return None

        def at(price: float) -> JointPlan:
            prices = self._sizes * (times.sum() / self._sizes.sum())
            chosen = solve(times + price * prices, units, MAX_UNITS)
            formats = self._policy(chosen)
            prediction = self._predict(partition, formats, keys, values)
            return JointPlan(
                formats, keys, values, known.weights_kld(formats), known.kv_kld(keys, values),
                prediction,
            )  # fmt: skip

        times = self._times(partition, self._sizes.mean(axis=1))
        plain = at(0.0)
        if any(device.cached for device in self._machine.devices):
            # the caches keep a share of what was chosen, not of the mean of all formats
            index = {format: i for i, format in enumerate(self._formats)}
            chosen_sizes = [
                sizes[index[plain.formats[m]]]
                for m, sizes in zip(self._matrices, self._sizes, strict=True)
            ]
            times = self._times(partition, np.array(chosen_sizes, np.float64))
            again = at(0.0)
            if self.cost(again.prediction) < self.cost(plain.prediction):
                plain = again
        if plain.prediction.fits:
            return plain
        smallest = at(1e6)
        if not smallest.prediction.fits:
            free = min(min(r.free_bytes, r.host_free_bytes) for r in smallest.prediction.ranks)
            self._lacking.append((-free, partition))
            return None
        return self._cheapest(at, smallest)

    @staticmethod
    def _cheapest(at: Callable[[float], JointPlan], fitting: JointPlan) -> JointPlan:
        """Bisect the price of a byte, on a logarithmic scale, to the fastest choice that fits."""
        low, high = math.log(1e-3), math.log(1e6)
        for _ in range(PRICE_STEPS):
            middle = (low + high) / 2
            found = at(math.exp(middle))
            if found.prediction.fits:
                fitting, high = found, middle
            else:
                low = middle
        return fitting

    def _policy(self, chosen: Iterable[np.intp]) -> dict[str, str]:
        return {m: self._formats[j] for m, j in zip(self._matrices, chosen, strict=True)}

    def _run(self, keys: str, values: str) -> RunConfig:
        return dataclasses.replace(self._config, kv=f"{keys}/{values}")

    def _predict(
        self, partition: str, formats: dict[str, str], keys: str, values: str
    ) -> Prediction:
        weights = WeightFormats(tuple(formats.items()), {})
        model = dataclasses.replace(self._model, weights=weights)
        found, refused = compare(
            model, self._machine, self._workload, self._run(keys, values), [partition]
        )
        if not found:
            raise UsageError(refused[partition])
        return found[0]

    def _times(self, partition: str, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of each matrix in each format over the workload, (matrix, format).

        `sizes` are the bytes of each matrix, of which the caches keep a share.
        """
        replicas = split_replicas(partition)
        plan = make_plan(self._model.spec, replicas[0], self._model.block_size)
        n_stages = plan.ranks[-1].stage + 1
        batch = -(-self._workload.batch // len(replicas))
        rows = max(1, batch // n_stages) if batch >= n_stages else 1
        steps = [(float(rows), float(self._workload.generate))]
        if self._objective == "throughput":
            tokens = batch * self._workload.prompt
            step = min(tokens, self._config.max_step_tokens)
            steps.append((float(step), tokens / step))
        # one rank reads at a time: the only one, or the stages of a pipeline with one sequence
        alone = len(plan.numbers) == n_stages and (n_stages == 1 or batch == 1)
        alone = alone and min(len(replicas), self._workload.batch) == 1
        places = self._places(plan, sizes)
        return np.array(
            [
                [
                    sum(
                        n
                        * self._seconds(
                            name, n_rows * n_cols, format, r, places[_layer(name)], alone
                        )
                        for r, n in steps
                    )
                    for format in self._formats
                ]
                for name, (n_rows, n_cols) in self._sensitivity.shapes.items()
            ]
        )

    def _places(self, plan: Plan, sizes: NDArray[np.float64]) -> dict[int, _Place]:
        """Return where each layer is computed."""
        stages: dict[int, float] = {}
        stage_of = {layer: rank.stage for rank in plan.ranks for layer in range(*rank.layers)}
        for name, n_bytes in zip(self._matrices, sizes, strict=True):
            stage = stage_of[_layer(name)]
            stages[stage] = stages.get(stage, 0.0) + float(n_bytes)
        places = {}
        for layer, stage in stage_of.items():
            ranks = [rank for rank in plan.ranks if rank.stage == stage]
            devices = [self._machine.devices[rank.rank] for rank in ranks]
            slowest = min(devices, key=lambda device: device.read_bytes_per_s)
            n_bytes = stages.get(stage, 0.0) / len(ranks)
            cached = 0.0 if slowest.cached is None else slowest.cached.of(n_bytes)
            places[layer] = _Place(slowest, len(ranks), cached)
        return places

    def _seconds(
        self, name: str, size: int, format: str, rows: float, place: _Place, alone: bool
    ) -> float:
        """Return the time of one matrix in a step of some rows."""
        read, multiplied = 1.0, rows
        moe = self._model.spec.moe
        if moe is not None and ".moe." in name:
            share = moe.top_k / moe.n_experts
            read, multiplied = 1.0 - (1.0 - share) ** rows, share * rows
        weights = size / place.n_ranks
        arithmetic = place.device.arithmetic(self._config.activations)
        operations = 2.0 * weights * multiplied
        return place.device.matrix_s(
            weights * read, operations, format, arithmetic, place.cached, alone
        )


@dataclass(frozen=True)
class _Place:
    """Slowest device of the stage that holds a layer."""

    device: Device
    n_ranks: int
    """Ranks of the stage."""
    cached: float
    """Share of the stage's weights that the caches hold."""


def _layer(name: str) -> int:
    """Return the layer of a matrix by our name, ``layers.N.``."""
    return int(name.split(".", 2)[1])
