#!/usr/bin/env python3
"""Measure the engine against llama.cpp on the same files, and write the rows to results/.

    python tools/measure/engine.py results/engine/MACHINE [--folder /tmp/models]
    python tools/measure/engine.py results/engine/MACHINE --only "1.1b q6_k" --options "-n 0"

Makes GGUF files with random weights (`nbflow.first_gpu_run.random_model`), runs `nbflow bench
--peer llama.cpp` on each in a new process, and appends its rows to rows.jsonl, of which docs/ shows
the newest of each kind.  Needs the extra 'bench' and a quiet machine: it takes about half an hour
and 12 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from published_rows import append, conditions

from nbflow.cli.bench_rows import table
from nbflow.first_gpu_run.random_model import SHAPES, write

Run = tuple[str, str, str, bool]
"""Shape, format of the file, options of `nbflow bench`, and whether llama.cpp runs, too."""
RUNS: tuple[Run, ...] = (
    *(("15m", f, "--activations int8 -p 512 -n 128", True) for f in ("q4_0", "q8_0")),
    ("15m", "f16", "-p 512 -n 128", True),
    *(
        ("1.1b", f, "--activations int8 -p 512 -n 32", True)
        for f in ("q4_0", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs")
    ),
    ("1.1b", "f16", "-p 512 -n 32", True),
    ("1.1b", "f16", "--activations bf16 -p 512 -n 0", True),
    ("1.1b", "q4_0", "--activations bf16 -p 512 -n 0", True),
    ("1.1b", "q4_0", "--activations f32 -p 512 -n 32", True),
    *(("1.1b", "q4_0", f"--activations int8 -p 0 -n 32 -d {d}", True) for d in (1024, 3500)),
    # llama.cpp runs with its own cache of float16 only
    *(
        ("1.1b", "q4_0", f"--activations int8 -p 0 -n 32 -d {d} --kv q8_0", False)
        for d in (1024, 3500)
    ),
    ("1.1b", "q4_0", "--activations int8 -p 0 -n 16 -b 8,32", True),
    *(("15m", "q4_0", f"--activations int8 -p 0 -n 64 -b {n}", True) for n in (1, 8, 16, 32)),
    ("3.4b-moe", "q4_0", "--activations int8 -p 512 -n 32", True),
    ("1.1b", "q4_k", "--activations int8 -p 4096 -n 0", True),
    ("1.4b-hybrid", "q4_0", "--activations int8 -p 128 -n 16", True),
    ("1.4b-hybrid", "q4_0", "--activations int8 --threads 1 -p 128 -n 16", True),
    ("1.4b-hybrid", "q4_0", "--activations int8 --state q8_0 --threads 1 -p 128 -n 16", False),
    *(
        ("1.1b", "f16", f"--activations int8 -p 512 -n 32 --weights {f}", False)
        for f in (
            *("q8_b32t1", "q8_b32t2", "q6_b64t1", "q5_b32t1", "q5_b64t1", "q4_b16", "q4_b32t1a"),
            *("q4_b32t1b", "q4_b64t1", "q3h_b64t1", "q3_b32t1a", "q3_b32t1b", "q2_b32t1a"),
            "q2_b32t1b",
        )
    ),
)


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/nbflow-models"))
    parser.add_argument("--repeats", default="5")
    parser.add_argument("--only", default="", help="runs whose description contains this")
    parser.add_argument("--options", default="", help="more options of nbflow bench: '-n 0'")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    facts = conditions()
    for run in RUNS:
        text = " ".join(run[:3])
        if arguments.only in text:
            print(text, file=sys.stderr, flush=True)
            made = [{"run": text, **row} for row in _measure(run, arguments)]
            append(arguments.out / "rows.jsonl", facts, made)


def _measure(run: Run, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one run."""
    shape, format, options, with_peer = run
    file = arguments.folder / f"{shape}-{format}.gguf"
    if not file.exists():
        write(file, SHAPES[shape], format)
    peer = ["--peer", "llama.cpp"] if with_peer else []
    command = ["nbflow", "bench", str(file), *options.split(), *arguments.options.split(), *peer]
    command += ["-r", arguments.repeats, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "nbflow", *command[1:]], stdout=subprocess.PIPE, check=True
    )
    made: list[dict[str, Any]] = json.loads(done.stdout)
    print(table(made), file=sys.stderr, flush=True)
    shown = " ".join([*command[:2], file.name, *command[3:]])
    return [row | {"command": shown} for row in made]


if __name__ == "__main__":
    main()
