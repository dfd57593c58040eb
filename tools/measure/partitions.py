"""Measure every partition of this machine's ranks against the planner's prediction.

    mpirun -n 2 python -m mpi4py tools/measure/partitions.py MODEL FOLDER
    python tools/measure/partitions.py MODEL FOLDER --ranks 2       (threads instead of processes)

First the machine is measured (nbflow/planner/measure_machine.py) and written to
FOLDER/machine.toml.  Then every partition of its ranks runs, after a single process with the cores
of all ranks.  Each row is appended to FOLDER/rows.jsonl, and FOLDER/README.md, the table of all
rows, is rewritten, so an interrupted run keeps its rows.  No partition and no repetition starts
after --seconds.  Quiet machines only.

With --again only the machine is measured, and the predictions of existing rows are recomputed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbflow
from nbflow.benchmark.timing import Times, time_both
from nbflow.cli.options import numbers
from nbflow.distributed import Comm, SelfComm, world
from nbflow.planner import (
    Machine,
    RunConfig,
    Workload,
    candidates,
    machine_toml,
    planned_model,
    predict,
)
from nbflow.planner.measure_machine import measure_machine, measure_ranks
from nbflow_kernels.cpu.cpu_quota import available_cores

WARM_UP = 2
"""Tokens of the warm-up run, which compiles."""


@dataclass(frozen=True)
class Case:
    """Configuration of a measured run."""

    name: str
    """Name in the table."""
    partition: str
    """The partition string."""
    threads: int
    """Threads of each rank."""
    machine: Machine
    """Machine description."""
    all_reduce: str = "f32"
    """Exchange format of partial sums."""
    alone: bool = False
    """True: one process runs it while the others wait."""


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path, help="e.g. results/partition/amd-epyc-2-cores/1.1b")
    parser.add_argument("--ranks", type=int, help="threads to measure, without mpirun")
    parser.add_argument("--weights", help="weight format (as stored)")
    parser.add_argument("--activations", default="f32", help="f32, bf16 or int8 (f32)")
    parser.add_argument("--batch", default="1,8", help="sequences at once (1,8)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (64)")
    parser.add_argument("--generate", type=int, default=16, help="tokens each draws (16)")
    parser.add_argument("--repeats", type=int, default=5, help="maximum repetitions of a row (5)")
    parser.add_argument("--seconds", type=float, default=420.0, help="time for all of it (420)")
    parser.add_argument(
        "--again", action="store_true", help="recompute the predictions of existing rows"
    )
    return parser.parse_args()


def main() -> None:
    """Run all cases."""
    arguments, comm, started = parse(), world(), time.monotonic()
    several: Machine = comm.bcast_object(measure_machine(nbflow.load, arguments.ranks))
    one: Machine = comm.bcast_object(
        measure_ranks(nbflow.load, SelfComm()) if comm.rank == 0 else None
    )
    out = Output(arguments, several, one) if comm.rank == 0 else None
    if arguments.again:
        if out is not None:
            out.predict_again(list(cases(several, one)))
        return
    batches = numbers(arguments.batch, "--batch")
    whole = list(cases(several, one))
    for i, case in enumerate(whole):
        left = arguments.seconds - (time.monotonic() - started)
        if not comm.bcast_object(left > 0):
            if comm.rank == 0:
                print(f"no time left for {', '.join(c.name for c in whole[i:])}")
            break
        run(case, arguments, comm, batches, left / (len(whole) - i), out)


def cases(several: Machine, one: Machine) -> Iterator[Case]:
    """Yield the partitions of a machine's ranks, after one process with all cores."""
    n = len(several.devices)
    threads = max(1, available_cores() // n)
    yield Case("one process", "0", available_cores(), one, alone=True)
    for partition in candidates(n):
        case = Case(f"`{partition}`", partition, threads, several)
        yield case
        if "&" in partition:
            yield Case(f"{case.name} q8", partition, threads, several, all_reduce="q8")


def run(
    case: Case,
    arguments: argparse.Namespace,
    comm: Comm,
    batches: list[int],
    seconds: float,
    out: Output | None,
) -> None:
    """Load the model for a case and measure each batch; collective over all ranks."""
    started = time.monotonic()
    options: dict[str, Any] = {"comm": SelfComm()} if case.alone else {}
    participates = comm.rank == 0 or not case.alone
    model = None
    if participates:
        model = nbflow.load(
            arguments.model, weights=arguments.weights, activations=arguments.activations,
            partition=case.partition, threads=case.threads, all_reduce=case.all_reduce, **options,
        )  # fmt: skip
    loaded_s = time.monotonic() - started
    for i, batch in enumerate(batches):
        left = (seconds - (time.monotonic() - started)) / (len(batches) - i)
        workload = Workload(batch, arguments.prompt, arguments.generate)
        taken = repeated(model, workload, arguments.repeats, comm, left)
        if out is not None:
            out.add(case, workload, taken, loaded_s)
    if model is not None:
        model.close()
    comm.barrier()


def repeated(
    model: nbflow.LLM | None, workload: Workload, repeats: int, comm: Comm, seconds: float
) -> list[Times]:
    """Return the times of each repetition: at least one, more while time is left."""
    here = model is not None and model.participates
    taken: list[Times] = []
    if here:
        assert model is not None
        time_both(model, workload.prompt, WARM_UP, workload.batch)
    started = time.monotonic()
    more = True
    while more:
        if here:
            assert model is not None
            taken.append(time_both(model, workload.prompt, workload.generate, workload.batch))
        spent = time.monotonic() - started
        one_more_s = spent / max(1, len(taken))
        more = len(taken) < repeats and spent + one_more_s < seconds
        more = bool(comm.bcast_object(more))
    return taken


class Output:
    """Output files of rank 0."""

    def __init__(self, arguments: argparse.Namespace, machine: Machine, one: Machine) -> None:
        self._arguments = arguments
        self._model = planned_model(arguments.model, arguments.weights)
        self._rows: list[dict[str, Any]] = []
        self._folder: Path = arguments.folder
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "machine.toml").write_text(machine_toml(machine))
        (self._folder / "one_process.toml").write_text(machine_toml(one))
        self._head = (
            f"# Partitions of {Path(arguments.model).stem}\n\n"
            f"{self._model.spec.n_parameters / 1e6:,.0f}e6 parameters, weights "
            f"{arguments.weights or 'as stored'}, activations {arguments.activations}; prompts of "
            f"{arguments.prompt} tokens, {arguments.generate} generated.  {machine.description}, "
            "described in machine.toml; the process that has the cores of all ranks, in "
            "one_process.toml.\nEvery repetition is in rows.jsonl; medians are shown, in brackets "
            "what was predicted less what was measured, as part of it.\n"
        )

    def add(
        self,
        case: Case,
        workload: Workload,
        taken: list[Times],
        loaded_s: float,
    ) -> None:
        """Append a row and rewrite the table."""
        row = {
            "case": case.name.replace("`", ""), "kind": "",
            "partition": case.partition, "threads": case.threads, "all_reduce": case.all_reduce,
            "batch": workload.batch, "prompt": workload.prompt, "generate": workload.generate,
            "load_s": loaded_s, "prefill_s": [t.prefill_s for t in taken],
            "decode_s": [t.step_s for t in taken],
            **self._predicted(case, workload),
        }  # fmt: skip
        self._rows.append(row)
        self._write()
        print(f"{case.name} batch {workload.batch}: {line(row, self._rows)}", flush=True)

    def predict_again(self, known: list[Case]) -> None:
        """Recompute the predictions of existing rows."""
        by_name = {case.name.replace("`", ""): case for case in known}
        for text in (self._folder / "rows.jsonl").read_text().splitlines():
            row = json.loads(text)
            workload = Workload(row["batch"], row["prompt"], row["generate"])
            self._rows.append(row | self._predicted(by_name[row["case"]], workload))
        self._write()

    def _predicted(self, case: Case, workload: Workload) -> dict[str, Any]:
        """Return the predictions of a case, as columns of a row."""
        setting = RunConfig(activations=self._arguments.activations, all_reduce=case.all_reduce)
        found = predict(self._model, case.partition, case.machine, workload, setting)
        return {
            "kind": found.kind,
            "predicted_prefill_s": found.prefill_s, "predicted_decode_s": found.decode_s,
            "predicted_bytes": [r.weight_bytes + r.kv_bytes for r in found.ranks],
        }  # fmt: skip

    def _write(self) -> None:
        lines = [json.dumps(row) + "\n" for row in self._rows]
        (self._folder / "rows.jsonl").write_text("".join(lines))
        (self._folder / "README.md").write_text(self._head + table(self._rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown, a table for each batch."""
    text = ""
    for batch in dict.fromkeys(row["batch"] for row in rows):
        text += (
            f"\n## Batch {batch}\n\n"
            "| ranks | threads each | prompt tokens/s | generated tokens/s | x one rank "
            "| x one process | n |\n|---|---|---|---|---|---|---|\n"
        )
        for row in rows:
            if row["batch"] == batch:
                name = row["case"] if row["case"] == "one process" else f"`{row['case']}`"
                kind = "" if row["case"] == "one process" else f" {row['kind']}"
                text += f"| {name}{kind} | {row['threads']} | {line(row, rows)} |\n"
    return text


def line(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the numbers of a row as cells of the table."""
    prefill, decode = (rates(row, name) for name in ("prefill_s", "decode_s"))
    cells = [f"{rate:,.1f} ({error:+.0%})" for rate, error in (prefill, decode)]
    for base in ("0", "one process"):
        of = [r for r in rows if (r["case"], r["batch"]) == (base, row["batch"])]
        cells.append(f"{decode[0] / rates(of[0], 'decode_s')[0]:.2f}" if of else "")
    return " | ".join([*cells, str(len(row["decode_s"]))])


def rates(row: dict[str, Any], name: str) -> tuple[float, float]:
    """Return tokens per second and the relative prediction error."""
    seconds = statistics.median(row[name])
    n = row["batch"] * (row["prompt"] if name == "prefill_s" else 1)
    return n / seconds, seconds / row[f"predicted_{name}"] - 1


if __name__ == "__main__":
    main()
