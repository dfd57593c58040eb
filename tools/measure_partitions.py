"""Compare what the planner predicts with what partitions reach on this machine.

    mpirun -n 2 python tools/measure_partitions.py MODEL OUT.json
    python tools/measure_partitions.py MODEL OUT.json --ranks 2     (threads)

Measures the machine (nbflow/planner/measure.py), then for every partition of its ranks and every
batch the prefill and the generation, and writes the rows with the ratio of predicted to measured
time, and the machine's description beside them (OUT.toml).  Quiet machines only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import nbflow
from nbflow.bench import time_decode, time_prefill
from nbflow.commands.options import numbers
from nbflow.parallel import world
from nbflow.planner import Setting, Workload, candidates, planned_model, predict, written_machine
from nbflow.planner.measure import measure_machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--weights", default="q8")
    parser.add_argument("--activations", default="f32")
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    comm = world()
    machine = comm.bcast_object(measure_machine(arguments.ranks))
    model = planned_model(arguments.model, arguments.weights)
    rows = []
    for partition in candidates(len(machine.devices), replicas=False):
        with nbflow.load(
            arguments.model,
            weights=arguments.weights,
            activations=arguments.activations,
            partition=partition,
            threads=1 if len(machine.devices) > 1 else None,
        ) as loaded:
            for batch in numbers(arguments.batch, "--batch") if loaded.participates else []:
                workload = Workload(batch, arguments.prompt, arguments.generate)
                row = measure(loaded, workload, arguments.repeats)
                predicted = predict(
                    model, partition, machine, workload, Setting(activations=arguments.activations)
                )
                rows.append(compared(partition, workload, row, predicted))
        comm.barrier()
    if comm.rank == 0:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"model": arguments.model, "weights": arguments.weights,
                 "activations": arguments.activations, "rows": rows}  # fmt: skip
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
        arguments.out.with_suffix(".toml").write_text(written_machine(machine))
        show(rows)


def measure(model: nbflow.Model, workload: Workload, repeats: int) -> dict[str, float]:
    """Return the median seconds of reading the prompts, and of a token for every sequence."""
    prefill = time_prefill(model, workload.prompt, workload.batch, repeats)
    decode = time_decode(model, workload.prompt, workload.generate, workload.batch, repeats)
    return {
        "prefill_s": statistics.median(prefill),
        "decode_s": statistics.median(decode) / workload.generate,
    }


def compared(partition, workload, measured, predicted) -> dict:
    row = {"partition": partition, "kind": predicted.kind, "batch": workload.batch,
           "prompt": workload.prompt, "micro_batches": predicted.micro_batches}  # fmt: skip
    for name, seconds in measured.items():
        row[name] = seconds
        row[f"predicted_{name}"] = getattr(predicted, name)
        row[f"{name}_predicted_over_measured"] = getattr(predicted, name) / seconds
    return row


def show(rows: list[dict]) -> None:
    print("partition  batch   prefill ms  predicted  ratio   decode ms  predicted  ratio")
    for row in rows:
        cells = [
            f"{row[n] * 1e3:10.3f} {row['predicted_' + n] * 1e3:10.3f} "
            f"{row[n + '_predicted_over_measured']:6.2f}"
            for n in ("prefill_s", "decode_s")
        ]
        print(f"{row['partition']:<9}  {row['batch']:>5}  {'  '.join(cells)}")


if __name__ == "__main__":
    main()
