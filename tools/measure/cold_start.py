"""Measure the time to first token with a cold and with a warm kernel cache.

    python tools/measure/cold_start.py [MODEL] [--weights FMT] [--activations A] [--out FILE.json]

Compiles the sources to bytecode, as pip does when it installs, then runs the model in new
processes, with an empty cache folder and again with the filled one, and prints the compiled kernels
of the first process, slowest first; children compile others.  *own* seconds exclude the compilation
of called kernels; both are CPU time of the compiling thread.  Totals are also given as wall time.
The processor time of children is of those that have ended.

A run before these is not counted.  It brings the model's file into memory, and the memory itself
into a virtual machine, whose host takes back what has been free for seconds: getting 800 MB again
cost one process 1.8 s of system time, and the next one 0.08 s.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = "weights", "activations", "threads"
"""Options of `nbflow.load` that are passed on."""


@dataclass
class Compiled:
    """One kernel that was compiled for one combination of argument types."""

    kernel: str
    own_s: float
    total_s: float


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Generate one token and return the times; runs in a new process."""
    clock, spent = time.perf_counter(), time.process_time()
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]
        def __init__(self) -> None:
            self.done: list[Compiled] = []
            self.running: list[list[float]] = []  # start, seconds in kernels called

        def on_start(self, event: Any) -> None:
            self.running.append([time.thread_time(), 0.0])

        def on_end(self, event: Any) -> None:
            started, inner = self.running.pop()
            total = time.thread_time() - started
            function = event.data["dispatcher"].py_func
            name = f"{function.__module__.removeprefix('nbflow_kernels.')}:{function.__qualname__}"
            self.done.append(Compiled(name.replace(".<locals>", ""), total - inner, total))
            if self.running:
                self.running[-1][1] += total

    listener = Listener()
    event.register("numba:compile", listener)
    import nbflow

    imported = time.perf_counter()
    given = {name: getattr(arguments, name) for name in OPTIONS if getattr(arguments, name)}
    with nbflow.load(arguments.model, **given) as loaded:
        opened = time.perf_counter()
        loaded.generate([1, 2, 3], max_tokens=1, ignore_eos=True)
    token = time.perf_counter()
    children = os.times()
    compiled = sorted(listener.done, key=lambda c: -c.own_s)
    return {
        "import_s": imported - clock,
        "load_s": opened - imported,
        "first_token_s": token - opened,
        "total_s": token - clock,
        "processor_s": time.process_time() - spent,
        "system_s": os.times().system,
        "children_s": children.children_user + children.children_system,
        "compile_s": sum(c.own_s for c in compiled),
        "kernels": [asdict(c) for c in compiled],
    }


def _run(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Measure in a new process with a cache folder."""
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "specs"))
    environment = os.environ | {"NUMBA_CACHE_DIR": folder, "PYTHONPATH": paths}
    command = [sys.executable, __file__, arguments.model, "--measure"]
    for name in OPTIONS:
        if getattr(arguments, name):
            command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


def table(result: dict[str, Any], n: int = 12) -> str:
    """Return the totals and the slowest kernels as Markdown."""
    lines = [
        "| | import | load | first token | total | processor | children |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("cold", "warm"):
        r = result[name]
        names = ("import", "load", "first_token", "total", "processor", "children")
        numbers = [r[f"{each}_s"] for each in names]
        lines.append(f"| {name} | " + " | ".join(f"{x:.2f} s" for x in numbers) + " |")
    kernels = result["cold"]["kernels"]
    rest = kernels[n:]
    lines += ["", "| kernel | own seconds | with what it calls |", "|---|---|---|"]
    lines += [f"| `{k['kernel']}` | {k['own_s']:.2f} | {k['total_s']:.2f} |" for k in kernels[:n]]
    lines.append(f"| {len(rest)} more | {sum(k['own_s'] for k in rest):.2f} | |")
    lines.append(f"| {len(kernels)} in all | {result['cold']['compile_s']:.2f} | |")
    return "\n".join(lines)


def main() -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", nargs="?", default="tiny_python")
    parser.add_argument("--weights", help="weight format; default: as stored")
    parser.add_argument("--activations", help="arithmetic of quantized products; default: float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        json.dump(measure(arguments), sys.stdout)
        return 0
    for package in ("nbflow", "kernels", "specs"):
        compileall.compile_dir(ROOT / package, quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        _run(arguments, f"{folder}/before")
        runs = {name: _run(arguments, f"{folder}/cache") for name in ("cold", "warm")}
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "specs")]
    from nbflow.utils.system import package_versions, processor_name

    result = _rounded(
        {
            "model": arguments.model,
            **{name: getattr(arguments, name) for name in OPTIONS},
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "packages": package_versions(),
            **runs,
        }
    )
    print(table(result))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
