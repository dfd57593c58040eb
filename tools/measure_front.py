#!/usr/bin/env python3
"""Measure what `nbflow launch serve` adds to `nbflow serve`: its front passes every byte on.

    python tools/measure_front.py results/server/MACHINE/front

Two servers of the bundled model run at the same time and are asked in turn: one by itself, one
behind the front.  A row is one kind of work with its samples, one for each turn:

- ``request``: requests one after the other that cost the server next to nothing (GET /version);
- ``stream cN``: N clients that read answers of 128 tokens as streams, one after the other.

Of each server: requests or tokens per second, the median time of one, and the processor time of the
server for one, in which the front's part is apart.  Needs a quiet machine with Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbflow.system import processor_name

NEW = 128
PROMPT = list(range(40, 56))
REQUESTS = 500
STREAMS = 12
"""Of each client in a turn."""


@dataclass
class Server:
    """A running server."""

    name: str
    port: int
    pids: tuple[int, ...]
    """Its processes; where there are two, the front's is the first."""

    def processor_s(self) -> list[float]:
        """Return the processor seconds that each process has taken."""
        return [
            sum(
                int(path.read_text().split()[0]) / 1e9
                for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
            )
            for pid in self.pids
        ]


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    kinds = {"request": (1, ask), "stream c1": (1, stream), "stream c8": (8, stream)}
    with started("serve") as alone, started("launch", "-n", "1", "serve") as behind:
        rows = []
        for name, (n_clients, work) in kinds.items():
            samples: dict[str, list[dict[str, float]]] = {alone.name: [], behind.name: []}
            for turn in range(arguments.turns + 1):
                for server in (alone, behind):
                    taken = timed(server, n_clients, work)
                    if turn:  # the first one warms up
                        samples[server.name].append(taken)
            rows.append({"test": name, "samples": samples})
            print(line(rows[-1]), flush=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    content = {"processor": processor_name(), "new": NEW, "rows": rows}
    (arguments.folder / "rows.json").write_text(json.dumps(content, indent=1) + "\n")
    head = (
        "| test | per second | of that behind the front | median ms | behind it | processor us "
        "| behind it | of that the front |\n" + "|---" * 8 + "|\n"
    )
    (arguments.folder / "table.md").write_text(head + "".join(line(row) for row in rows))


@contextlib.contextmanager
def started(*command: str) -> Iterator[Server]:
    """Start a server of the bundled model."""
    arguments = ["tiny_python", "--port", "0", "--threads", "1", "--log-level", "warning"]
    process = subprocess.Popen(
        [sys.executable, "-m", "nbflow.cli", *command, *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/server_info")
        rank = int(json.load(connection.getresponse())["pid"])
        name = " ".join(command)
        yield Server(name, port, tuple(dict.fromkeys((process.pid, rank))))
    finally:
        process.terminate()
        process.wait()


def ask(connection: http.client.HTTPConnection) -> list[float]:
    """Ask for next to nothing, often; return the seconds of each."""
    seconds = []
    for _ in range(REQUESTS):
        begun = time.perf_counter()
        connection.request("GET", "/version")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - begun)
    return seconds


def stream(connection: http.client.HTTPConnection) -> list[float]:
    """Read streams; return the seconds of each token."""
    body = {"prompt": PROMPT, "max_tokens": NEW, "ignore_eos": True, "stream": True}
    seconds = []
    for _ in range(STREAMS):
        begun = time.perf_counter()
        text = json.dumps(body)
        connection.request("POST", "/v1/completions", text, {"content-type": "application/json"})
        answer = connection.getresponse().read()
        assert answer.endswith(b"[DONE]\n\n"), answer[-200:]
        seconds += [(time.perf_counter() - begun) / NEW] * NEW
    return seconds


def timed(server: Server, n_clients: int, work: Any) -> dict[str, float]:
    """Let clients work, and return what it took."""
    found: list[float] = []

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        found.extend(work(connection))
        connection.close()

    clients = [threading.Thread(target=client) for _ in range(n_clients)]
    before, begun = server.processor_s(), time.perf_counter()
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    wall = time.perf_counter() - begun
    used = [b - a for a, b in zip(before, server.processor_s(), strict=True)]
    n = len(found)
    front = used[0] if len(used) == 2 else 0.0
    return {
        "per_s": n / wall,
        "median_s": statistics.median(found),
        "processor_s": sum(used) / n,
        "front_processor_s": front / n,
    }


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    alone, behind = (
        {name: statistics.median(s[name] for s in samples) for name in samples[0]}
        for samples in row["samples"].values()
    )
    cells = [
        f"{alone['per_s']:,.0f}", f"{behind['per_s'] / alone['per_s']:.1%}",
        f"{alone['median_s'] * 1e3:.3f}", f"{behind['median_s'] * 1e3:.3f}",
        f"{alone['processor_s'] * 1e6:.0f}", f"{behind['processor_s'] * 1e6:.0f}",
        f"{behind['front_processor_s'] * 1e6:.0f}",
    ]  # fmt: skip
    return f"| {row['test']} | {' | '.join(cells)} |\n"


if __name__ == "__main__":
    main()
