"""Predictions of `nbflow plan --max-kld` against measurements of random choices.

    python tools/measure/joint_plan.py MODEL FOLDER --what kld     --points 100
    python tools/measure/joint_plan.py MODEL FOLDER --what speed   --points 105 --seconds 340
    python tools/measure/joint_plan.py MODEL FOLDER --what choices --seconds 200
    python tools/measure/joint_plan.py MODEL FOLDER --what table

``all`` measures the machine, speeds and choices, and writes the table; ``kld`` and its losses do
not depend on the load of a machine and may be measured before.

A point is a random format for each matrix (around a random middle), cache formats, and for speed
a partition of two ranks (threads), a batch and a length of the prompts: one choice of formats and
partition is loaded for all batches.  ``--seed`` begins at other random choices, so that a change of
the predictions can be tested on points that it was not made with.  ``kld`` measures the divergence
on the second half of the model's eval.txt; the losses (FOLDER/losses.json) were measured on the
first half.  ``speed`` measures tokens per second (quiet machines only; FOLDER/machine.toml is
measured at first, and again if its measurement has another version; rows of another one are left
out).

``choices`` measures, for two limits and two batches, the plan and the best plans with each other
partition, in turn; ``table`` (FOLDER/README.md) compares the plan with the fastest of them and of
the points within the limit: the regret is the speed that the fastest one has above the plan's.

Each measurement of speed has a fixed product on both ranks before and after it (`probe_s`), and
reads of memory (`read_bytes_per_s`).  Where the product takes over `DISTURBED` times as long as the
fastest one of the run, other programs or guests of the host were at work.  The bandwidth of a
virtual machine may change by half within seconds (perhaps its cores move to other chips): where it
is by `OTHER_MEMORY` above or below that of FOLDER/machine.toml, the machine is not the measured
one.  In both cases the measurement is repeated, at most `TRIES` times; the table has lines for all
rows and for those that remain.  Each row has the predictions for the machine as described, and for
the memory bandwidth that was measured before and after it (`Machine.at_bandwidth`).

Rows are appended to FOLDER/rows.jsonl; a run goes on with the next point.  MODEL may be
``random``: 90 million random weights with the tokenizer of tiny_python, made in a temporary folder,
because a model that fits into the caches is faster than its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from published_rows import append, conditions
from safetensors.numpy import save_file

import nbflow
from nbflow.benchmark.timing import Times, time_both
from nbflow.calibration.allocation import (
    JointPlan,
    Sensitivity,
    measure_sensitivity,
    plan_jointly,
    read_sensitivity,
)
from nbflow.calibration.allocation.divergence import DivergenceProbe
from nbflow.distributed import Comm
from nbflow.distributed.thread_ranks import ThreadRanks
from nbflow.planner import (
    Machine,
    RunConfig,
    Workload,
    load_machine,
    machine_toml,
    planned_model,
    predict,
)
from nbflow.planner.measure_kernels import Ranks, lower_quartile, matrix, product_timer
from nbflow.planner.measure_machine import (
    PROBE_BYTES,
    ROUNDS,
    VERSION,
    measure_machine,
    median_machine,
)
from nbflow.quantization.policy import WeightFormats, is_quantized
from nbflow.spec import resolve
from nbflow_kernels import FORMATS
from nbflow_kernels.benchmarks.roofline import ReadProbe
from nbflow_kernels.cpu.parallel_for import set_num_threads
from nbflow_kernels.errors import UsageError

PARTS = ("kld", "speed", "choices", "table")
WEIGHTS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")
CACHES = ("f16", "q8_0", "q5_0", "q4_0")
PARTITIONS = ("0", "0;1", "0&1", "0/1")
CASES = ((1, (64,)), (1, (16, 384)), (4, (16, 64, 128)), (8, (64,)), (16, (16, 32)))
"""Batches, each with lengths of the prompts to choose from: at most 512 tokens in all, so that a
point takes one to two seconds."""
LIMITS = (0.01, 0.1)
CHOICE_BATCHES, CHOICE_PROMPT = (1, 8), 64
"""Every choice of formats is measured with these, too, so that speeds can be compared."""
GENERATE, REPEATS = 24, 4
DISTURBED, OTHER_MEMORY, TRIES = 1.1, 1.25, 6
"""Time of the fixed product as a multiple of its fastest, and ratio of memory bandwidths, above
which a measurement is repeated; and how often it is measured at most."""
PROBE_ROWS, PROBE_S, READS = 8, 0.02, 5
"""Rows of the fixed product, seconds of its repetitions (several time slices of a core), and reads
of `PROBE_BYTES`."""
QUANTIZER, ACTIVATIONS = "reference", "int8"


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--what", choices=(*PARTS, "all"), required=True)
    parser.add_argument("--points", type=int, default=100, help="points in all (100)")
    parser.add_argument("--seed", type=int, default=0, help="first random choice (0)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each half (4096)")
    parser.add_argument("--seconds", type=float, default=1e9, help="no point starts after it")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    model = random_model() if arguments.model == "random" else arguments.model
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for what in PARTS[1:] if arguments.what == "all" else (arguments.what,):
        if what != "table":
            Run(model, what, arguments, end).run()
            continue
        text = table(rows_of(arguments.folder))
        (arguments.folder / "README.md").write_text(f"# Joint plans, {arguments.model}\n\n{text}\n")
        print(text)


Measured = TypeVar("Measured")
"""Result of a measurement."""


class Run:
    """One part of a run of the tool."""

    def __init__(self, model: str, what: str, arguments: argparse.Namespace, end: float) -> None:
        self._model, self._what, self._arguments = model, what, arguments
        self._folder: Path = arguments.folder
        self._facts = conditions() | {"model": arguments.model, "quantizer": QUANTIZER}
        self._end = end
        self._halves = self._split_text()
        # times need no losses
        self.known = self._shapes() if what == "speed" else self._losses()

    def run(self) -> None:
        """Measure what is asked for."""
        if self._what == "kld":
            probe = self._probe(1)
            for seed, formats, kv in self._points("kld"):
                self._measure_kld(probe, seed, formats, kv)
            return
        self._probe_machine = MachineProbe()
        machine = self._machine()
        if self._what == "speed":
            self._measure_speeds(machine)
            return
        self._measure_choices(machine)

    def _split_text(self) -> tuple[Path, Path]:
        text = (resolve(self._model).path / "eval.txt").read_text(encoding="utf-8")
        half = text.index("\n", len(text) // 2) + 1
        folder = Path(tempfile.mkdtemp(prefix="joint_plan-"))
        paths = folder / "text0.txt", folder / "text1.txt"
        for path, part in zip(paths, (text[:half], text[half:]), strict=True):
            path.write_text(part, encoding="utf-8")
        return paths

    def _probe(self, half: int) -> DivergenceProbe:
        return DivergenceProbe(self._model, self._halves[half], n_tokens=self._arguments.tokens)

    def _shapes(self) -> Sensitivity:
        shapes = planned_model(self._model).spec.tensor_shapes()
        return Sensitivity(
            {n: (s[0], s[1]) for n, s in shapes.items() if is_quantized(n, s)}, {}, {}
        )

    def _losses(self) -> Sensitivity:
        path = self._folder / "losses.json"
        if path.exists():
            return read_sensitivity(path)
        found = measure_sensitivity(
            self._model, WEIGHTS, CACHES, self._probe(0), quantizer=QUANTIZER
        )
        found.write(path)
        return found

    def _machine(self) -> Machine:
        path = self._folder / "machine.toml"
        # a file of an older measurement may have keys that are unknown now
        if not path.exists() or f"measurement = {VERSION}\n" not in path.read_text():
            path.write_text(machine_toml(self._measured()))
        return load_machine(path)

    def _measured(self) -> Machine:
        """Return the medians of rounds of measurements between which the memory stays the same."""
        rounds: list[Machine] = []

        def measure() -> Machine:
            formats = (*WEIGHTS, "f16")
            machine = measure_machine(nbflow.load, 2, formats=formats, arithmetics=(ACTIVATIONS,))
            assert machine is not None
            return machine

        for _ in range(ROUNDS):
            rounds.append(self._undisturbed(measure, lambda found: [*rounds, found][0])[0])
        return median_machine(rounds)

    def _choice(self, seed: int) -> tuple[dict[str, str], str]:
        """Return the weight formats and cache formats of a point."""
        rng = np.random.default_rng(seed)
        middle = rng.uniform(-0.5, len(WEIGHTS) - 0.5)
        at = np.rint(rng.normal(middle, 1.0, len(self.known.shapes)))
        chosen = at.clip(0, len(WEIGHTS) - 1).astype(int)
        formats = {m: WEIGHTS[j] for m, j in zip(self.known.shapes, chosen, strict=True)}
        return formats, "/".join(rng.choice(CACHES, 2))

    def _points(self, what: str) -> Iterator[tuple[int, dict[str, str], str]]:
        """Yield the seed, formats and cache of each point that is missing."""
        done = {row["seed"] for row in rows_of(self._folder) if row["what"] == what}
        for seed in range(self._arguments.seed, self._arguments.seed + self._arguments.points):
            if seed in done:
                continue
            if time.monotonic() >= self._end:
                break
            yield seed, *self._choice(seed)

    def _measure_speeds(self, machine: Machine) -> None:
        """Measure all batches of each choice that is missing."""
        rows = [r for r in rows_of(self._folder) if r["what"] == "speed"]
        done = {(r["seed"], r["batch"], r["prompt"]) for r in rows}
        first, n = self._arguments.seed, -(-self._arguments.points // len(CASES))
        for seed in range(first, first + n):
            rng = np.random.default_rng((seed, 1))
            # partitions in turn, so that a part of the points has all of them
            partition = PARTITIONS[seed % len(PARTITIONS)]
            cases = [(batch, int(rng.choice(prompts))) for batch, prompts in CASES]
            missing = [case for case in cases if (seed, *case) not in done]
            if time.monotonic() >= self._end:
                break
            if missing:
                formats, kv = self._choice(seed)
                with self._load(formats, kv, partition) as loaded:
                    for case in missing:
                        found = self._time(machine, loaded, *case)
                        self._write_speed(
                            machine, formats, kv, partition, case, *found, what="speed", seed=seed
                        )

    def _measure_kld(
        self, probe: DivergenceProbe, seed: int, formats: dict[str, str], kv: str
    ) -> None:
        found = probe.measure(
            weights=WeightFormats(tuple(formats.items()), {}), kv=kv, quantizer=QUANTIZER
        )
        keys, values = kv.split("/")
        row = {
            "what": "kld", "seed": seed, "kv": kv, "bits": self._bits(formats),
            "kld": found.kld, "kld_stderr": found.kld_stderr,
            "predicted_kld": self.known.weights_kld(formats) + self.known.kv_kld(keys, values),
        }  # fmt: skip
        self._append(row)

    def _load(self, formats: dict[str, str], kv: str, partition: str) -> Any:
        """Return the model with a choice of formats and a partition, one thread for each rank."""
        return nbflow.load(
            self._model, weights=WeightFormats(tuple(formats.items()), {}), kv=kv,
            partition=partition, quantizer=QUANTIZER, activations=ACTIVATIONS, threads=1,
            max_context=512,
        )  # fmt: skip

    def _write_speed(
        self, machine: Machine, formats: dict[str, str], kv: str, partition: str,
        case: tuple[int, int], taken: Sequence[Times], state: MachineState, **more: Any,
    ) -> None:  # fmt: skip
        """Write the row of a choice with a batch and a length of the prompts."""
        batch, prompt = case
        row = {
            "predictor": VERSION, "kv": kv, "partition": partition, "batch": batch,
            "prompt": prompt, "bits": self._bits(formats),
            "prefill_s": lower_quartile([t.prefill_s for t in taken]),
            "decode_s": lower_quartile([t.step_s for t in taken]),
            "decode_s_of_all": [t.step_s for t in taken], **vars(state), **more,
        }  # fmt: skip
        model = planned_model(self._model, WeightFormats(tuple(formats.items()), {}))
        config = RunConfig(kv=kv, activations=ACTIVATIONS)
        now = machine.at_bandwidth(state.read_bytes_per_s)
        for suffix, known in (("", machine), ("_now", now)):
            found = predict(model, partition, known, Workload(batch, prompt, GENERATE), config)
            row[f"predicted_prefill_s{suffix}"] = found.prefill_s
            row[f"predicted_decode_s{suffix}"] = found.decode_s
        self._append(row)

    def _time(
        self, machine: Machine, loaded: Any, batch: int, prompt: int
    ) -> tuple[list[Times], MachineState]:
        """Return the least disturbed repetitions, and the state of the machine around them."""
        time_both(loaded, prompt, 2, batch)
        return self._undisturbed(
            lambda: [time_both(loaded, prompt, GENERATE, batch) for _ in range(REPEATS)],
            lambda taken: machine,
        )

    def _undisturbed(
        self, measure: Callable[[], Measured], described: Callable[[Measured], Machine]
    ) -> tuple[Measured, MachineState]:
        """Return the least disturbed measurement, and the state of the machine around it.

        `described` returns the machine whose memory bandwidth both should have.
        """
        tries: list[tuple[MachineState, Measured]] = []
        for _ in range(TRIES):
            before = self._probe_machine.state()
            taken = measure()
            after = self._probe_machine.state()
            read_bytes_per_s = described(taken).devices[0].read_bytes_per_s
            tries.append((before.and_later(after, read_bytes_per_s), taken))
            if tries[-1][0].disturbance(self._probe_machine.fastest_s) <= 1.0:
                break
        fastest_s = self._probe_machine.fastest_s
        state, taken = min(tries, key=lambda each: each[0].disturbance(fastest_s))
        return taken, state

    def _measure_choices(self, machine: Machine) -> None:
        """Measure the plan for each limit and batch, and the best plans of other partitions."""
        probe = self._probe(1)
        done = {(r["limit"], r["batch"]) for r in rows_of(self._folder) if r["what"] == "choices"}
        for limit, batch in itertools.product(LIMITS, CHOICE_BATCHES):
            if time.monotonic() >= self._end or (limit, batch) in done:
                continue
            plans = list(self._plans(machine, limit, batch))
            best = min(plans, key=lambda plan: plan.prediction.decode_s)
            case = batch, CHOICE_PROMPT
            for plan, taken, state in self._in_turn(machine, plans, case):
                weights = WeightFormats(tuple(plan.formats.items()), {})
                kv = f"{plan.keys}/{plan.values}"
                kld = probe.measure(weights=weights, kv=kv, quantizer=QUANTIZER).kld
                self._write_speed(
                    machine, plan.formats, kv, plan.prediction.partition, case, taken, state,
                    what="choices", limit=limit, chosen=plan is best, kld=kld,
                )  # fmt: skip

    def _in_turn(
        self, machine: Machine, plans: Sequence[JointPlan], case: tuple[int, int]
    ) -> list[tuple[JointPlan, list[Times], MachineState]]:
        """Measure plans in several rounds, so that a change of the machine meets all of them."""
        found: list[list[tuple[list[Times], MachineState]]] = [[] for _ in plans]
        with contextlib.ExitStack() as stack:
            models = [
                stack.enter_context(
                    self._load(
                        plan.formats, f"{plan.keys}/{plan.values}", plan.prediction.partition
                    )
                )
                for plan in plans
            ]
            for _ in range(ROUNDS):
                for rounds, model in zip(found, models, strict=True):
                    rounds.append(self._time(machine, model, *case))
        fastest_s = self._probe_machine.fastest_s
        return [
            (
                plan,
                [times for taken, _ in rounds for times in taken],
                max((state for _, state in rounds), key=lambda each: each.disturbance(fastest_s)),
            )
            for plan, rounds in zip(plans, found, strict=True)
        ]

    def _plans(self, machine: Machine, limit: float, batch: int) -> Iterator[JointPlan]:
        """Yield the fastest plan with each possible partition for a limit of the divergence."""
        workload = Workload(batch, CHOICE_PROMPT, GENERATE)
        for partition in PARTITIONS:
            try:
                yield plan_jointly(
                    planned_model(self._model), machine, workload, self.known, limit,
                    config=RunConfig(activations=ACTIVATIONS), objective="latency",
                    partitions=(partition,),
                )  # fmt: skip
            except UsageError as error:
                print(f"{partition}: {error}")

    def _bits(self, formats: dict[str, str]) -> float:
        sizes = {m: n * k for m, (n, k) in self.known.shapes.items()}
        stored = sum(sizes[m] * FORMATS[f].bits_per_weight for m, f in formats.items())
        return round(stored / sum(sizes.values()), 4)

    def _append(self, row: dict[str, Any]) -> None:
        append(self._folder / "rows.jsonl", self._facts, [row])
        print(json.dumps(row), flush=True)


@dataclass(frozen=True)
class MachineState:
    """Speed of the machine before and after a measurement."""

    probe_s: float
    """Seconds per weight of a fixed product on both ranks at once, on the slower one."""
    read_bytes_per_s: float
    """Memory bandwidth of a rank while both read."""
    read_ratio: float = 1.0
    """Ratio, at least 1, of the bandwidths before and after to that of the described machine."""

    def and_later(self, later: MachineState, described: float) -> MachineState:
        """Return the slower product, the mean bandwidth, and the larger ratio of two moments."""
        reads = self.read_bytes_per_s, later.read_bytes_per_s
        ratio = max(max(read, described) / min(read, described) for read in reads)
        return MachineState(max(self.probe_s, later.probe_s), statistics.fmean(reads), ratio)

    def disturbance(self, fastest_s: float) -> float:
        """Return how far from the described machine this is; up to 1 counts as the same."""
        return max(self.probe_s / fastest_s / DISTURBED, self.read_ratio / OTHER_MEMORY)


class MachineProbe:
    """Product and reads on both ranks, whose times tell the speed of the machine at the moment."""

    fastest_s = np.inf

    def __init__(self) -> None:
        self._ranks = ThreadRanks(2)

        def make(comm: Comm) -> tuple[Callable[[], float], ReadProbe]:
            set_num_threads(1)
            product = product_timer(matrix("q4_k"), PROBE_ROWS, ACTIVATIONS, PROBE_S)
            return product, ReadProbe(PROBE_BYTES, 1)

        self._probes = self._ranks.run(make)

    def state(self) -> MachineState:
        """Measure the speed of the machine."""

        def measure(comm: Comm) -> tuple[float, float]:
            product, read = self._probes[comm.rank]
            product()  # an idle core needs a while to reach its speed
            comm.barrier()
            return product(), read.n_bytes / Ranks(comm).at_once(read.seconds, READS)

        products, reads = zip(*self._ranks.run(measure), strict=True)
        self.fastest_s = min(self.fastest_s, max(products))
        return MachineState(max(products), statistics.fmean(reads))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a folder; those of speed only with the present version of predictions."""
    path = folder / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["what"] == "kld" or row.get("predictor") == VERSION]


def table(rows: list[dict[str, Any]]) -> str:
    """Return errors of the predictions, and the regret of the choices, as Markdown."""
    prompt, token, alike = "time of a prompt", "time of a generated token", undisturbed(rows)
    columns = "speed", "predicted_decode_s", "decode_s"
    now = "speed", "predicted_decode_s_now", "decode_s"
    lines = [
        "| predicted | points | median error | 90 % below | largest |",
        "|---|--:|--:|--:|--:|",
        *errors(rows, "KL divergence", "kld", "predicted_kld", "kld"),
        *errors(rows, prompt, "speed", "predicted_prefill_s", "prefill_s"),
        *errors(rows, token, *columns),
        *errors(alike, f"{token}, machine as described", *columns),
        *errors(alike, f"{token}, bandwidth of the time", *now),
        *spread(rows),
    ]
    for key, values in (("partition", PARTITIONS), ("batch", sorted({b for b, _ in CASES}))):
        for value in values:
            some = [row for row in alike if row[key] == value]
            lines += errors(some, f"{token}, bandwidth of the time, {key} `{value}`", *now)
    found = list(regrets(rows))
    if found:
        lines += ["", "| limit | batch | plan | tokens/s | fastest | tokens/s | regret | KLD |"]
        lines += ["|--:|--:|---|--:|---|--:|--:|--:|", *found]
    return "\n".join(lines)


def undisturbed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the measurements of speed of the machine as it was described."""
    fastest: dict[str, float] = {}
    for row in rows:
        run = row["measurement"]
        fastest[run] = min(fastest.get(run, np.inf), row.get("probe_s", np.inf))
    names = [field.name for field in dataclasses.fields(MachineState)]
    return [
        row for row in rows
        if row["what"] == "speed"
        and MachineState(**{n: row[n] for n in names}).disturbance(fastest[row["measurement"]])
        <= 1.0
    ]  # fmt: skip


def errors(
    rows: list[dict[str, Any]], name: str, what: str, predicted: str, measured: str
) -> list[str]:
    """Return the line of a prediction's relative errors, if there are rows."""
    return _line(name, [abs(r[predicted] / r[measured] - 1) for r in rows if r["what"] == what])


def spread(rows: list[dict[str, Any]]) -> list[str]:
    """Return the line of how much longer than the shortest the longest repetition takes."""
    times = [row["decode_s_of_all"] for row in rows if row["what"] == "speed"]
    return _line(
        "four repetitions, longest over shortest", [max(each) / min(each) - 1 for each in times]
    )


def _line(name: str, sizes: list[float]) -> list[str]:
    if not sizes:
        return []
    numbers = np.median(sizes), np.quantile(sizes, 0.9), max(sizes)
    return [f"| {name} | {len(sizes)} | {' | '.join(f'{100 * x:.1f} %' for x in numbers)} |"]


def regrets(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each plan: its speed against the fastest one within the limit."""
    klds = {row["seed"]: row["kld"] for row in rows if row["what"] == "kld"}
    choices = [row for row in rows if row["what"] == "choices"]
    for plan in (row for row in choices if row["chosen"]):
        limit, batch = plan["limit"], plan["batch"]
        others = [r for r in choices if (r["limit"], r["batch"]) == (limit, batch)]
        others += [
            r for r in rows
            if (r["what"], r.get("batch"), r.get("prompt")) == ("speed", batch, CHOICE_PROMPT)
            and klds.get(r["seed"], np.inf) <= limit
        ]  # fmt: skip
        rate = batch / plan["decode_s"]
        best = min(others, key=lambda row: float(row["decode_s"]))
        name = f"`{best['partition']}` " + ("planned" if "limit" in best else "random")
        best_rate = batch / best["decode_s"]
        yield (
            f"| {limit:g} | {batch} | `{plan['partition']}` | {rate:.1f} | {name} | {best_rate:.1f}"
            f" | {100 * (best_rate / rate - 1):.1f} % | {plan['kld']:.4f} |"
        )


def random_model() -> str:
    """Write a Llama with random weights and the tokenizer and text of tiny_python; return it."""
    folder = Path(tempfile.gettempdir()) / "nbflow_joint_plan"
    if (folder / "model.safetensors").exists():
        return str(folder)
    source = resolve("tiny_python").path
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "eval.txt"):
        shutil.copy(source / name, folder)
    config = json.loads((source / "config.json").read_text())
    config |= {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "head_dim": 64,
        "num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    rng, width, n_vocab = np.random.default_rng(0), 1024, config["vocab_size"]

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * shape[1] ** -0.5).astype(np.float16)

    tensors = {
        "model.embed_tokens.weight": matrix(n_vocab, width),
        "lm_head.weight": matrix(n_vocab, width),
        "model.norm.weight": np.ones(width, np.float16),
    }
    shapes = {
        "self_attn.q_proj": (1024, width), "self_attn.k_proj": (256, width),
        "self_attn.v_proj": (256, width), "self_attn.o_proj": (width, 1024),
        "mlp.gate_proj": (2816, width), "mlp.up_proj": (2816, width),
        "mlp.down_proj": (width, 2816),
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = np.ones(width, np.float16)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


if __name__ == "__main__":
    main()
