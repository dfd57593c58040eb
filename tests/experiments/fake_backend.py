"""Fake engine: tiny tables instead of a model, failures and delays on demand.

Unit tests of the sweep machinery use it; `test_sweep_real_model.py` uses the real engine.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from nbflow.distributed.launch import launched_as
from nbflow.utils.atomic_write import write_text
from nbflow_experiments import backend

BITS = {
    "f32": 32.0,
    "f16": 16.0,
    "q8": 8.5,
    "q6": 6.5,
    "q5": 5.5,
    "q4": 5.0,
    "q3h": 4.0,
    "q3": 4.0,
    "q2": 3.0,
}
NOISE = {"f32": 0.0, "f16": 1e-4, "q8": 0.003, "q6": 0.015, "q5": 0.03, "q4": 0.06}
NOISE |= {"q3h": 0.09, "q3": 0.13, "q2": 0.3}
VOCAB, CONTEXT = 48, 64
HERE = threading.local()
"""`HERE.rank` is the rank of the calling thread, 0 unless set."""


def rank() -> int:
    return getattr(HERE, "rank", 0)


def exact_table() -> np.ndarray:
    return np.random.default_rng(1).normal(0, 2, (VOCAB, VOCAB))


def sample_text(n: int) -> list[int]:
    """Return tokens drawn from the exact model, so that it is better than the noisy ones."""
    rng, weights = np.random.default_rng(2), np.exp(exact_table())
    ids = [0]
    for _ in range(n - 1):
        row = weights[ids[-1]]
        ids.append(int(rng.choice(VOCAB, p=row / row.sum())))
    return ids


class FakeModel:
    """Logits of token t are row t of a fixed table plus noise that grows with fewer bits."""

    def __init__(self, fake: FakeEngine, weights: str, partition: str, alone: bool) -> None:
        self.fake, self.weights, self.partition = fake, weights, partition
        self.plan = SimpleNamespace(partition=partition)
        self.ranks = (0,) if alone else backend.partition_ranks(partition)
        self.participates = alone or fake.size == 1 or rank() in self.ranks
        noise = np.random.default_rng(4).normal(0, 2, (VOCAB, VOCAB))
        self.table = (exact_table() + NOISE[weights] * noise).astype(np.float32)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        self.fake.count("logits")
        self.fake.hook("logits", self.weights, self.partition)
        return self.table[ids]

    def memory(self) -> list[dict[str, int]]:
        share = int(BITS[self.weights] * 1000) // len(self.ranks)
        return [
            {
                "rank": r, "weight_bytes": share, "kv_used_bytes": 64, "kv_bytes": 128,
                "workspace_bytes": 32, "peak_rss_bytes": 10**6 + r,
            }
            for r in self.ranks
        ]  # fmt: skip

    def devices(self) -> list[dict[str, str]]:
        cpu = {"device": "cpu", "hardware": "a processor", "key": "", "process": "1"}
        return [cpu for _ in self.ranks]

    def reset_memory(self) -> None:
        pass

    def reset_traffic(self) -> None:
        pass

    def gather(self, method: str) -> list[dict[str, int]]:
        assert method == "traffic"
        sent = {"measured_bytes": 512, "predicted_bytes": 512}
        return [dict.fromkeys(sent, 0), *(sent for _ in self.ranks[1:])]

    def close(self) -> None:
        self.fake.count("close")


class FakeEngine:
    """Replacement of the functions of `nbflow_experiments.backend`."""

    def __init__(self, folder: Path, size: int = 1, delay_s: float = 0.0) -> None:
        self.folder, self.size, self.delay_s = folder, size, delay_s
        self.counts: dict[str, int] = {}
        self.failures: dict[tuple[str, str, str], Callable[[], None]] = {}
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "eval.txt", " ".join(map(str, sample_text(400))))  # others may read it

    def count(self, name: str) -> None:
        with self._lock:
            self.counts[name] = self.counts.get(name, 0) + 1

    def hook(self, where: str, weights: str, partition: str) -> None:
        self.failures.get((where, weights, partition), lambda: None)()

    def identify(self, model: str) -> backend.ModelIdentity:
        digest = hashlib.sha256(model.encode()).hexdigest()
        return backend.ModelIdentity(model, digest, self.folder, CONTEXT, VOCAB)

    def plan_memory(self, config: Mapping[str, Any], partition: str) -> Any:
        ranks = backend.partition_ranks(partition)
        bytes_each = {"kv_bytes": 128, "workspace_bytes": 32}
        weights = int(BITS[str(config["weights"])] * 1000) // len(ranks)
        return SimpleNamespace(
            ranks=[SimpleNamespace(rank=r, weight_bytes=weights, **bytes_each) for r in ranks],
            devices=["cpu"] * len(ranks),
        )

    def load(self, model: str, *, weights: str, partition: str, comm: Any = None, **_: Any) -> Any:
        self.count("load")
        if comm is None:
            self.hook("load", weights, partition)
        return FakeModel(self, weights, partition, comm is not None)

    def seconds(self, model: FakeModel, tokens: int, batch: int, repeats: int) -> list[float]:
        self.hook("time", model.weights, model.partition)
        time.sleep(self.delay_s)
        rng = np.random.default_rng(len(model.partition) + batch)
        speed = 1000 * batch**0.7 * len(model.ranks) ** 0.5 * (32 / BITS[model.weights]) ** 0.5
        return list(tokens * batch / speed * (1 + 0.1 * rng.random(repeats)))

    def install(self, put: Callable[[object, str, Any], None] = setattr) -> FakeEngine:
        """Replace the functions of the engine module, by default for good."""
        put(backend, "format_names", lambda: tuple(BITS))
        put(backend, "is_weight_format", lambda name: name.lower() in BITS)
        put(backend, "stores_blocks", lambda model: False)
        put(backend, "bits_per_weight", lambda name, model="": BITS[name])
        put(backend, "model_bytes", lambda model, weights, *_: (int(1000 * BITS[weights]), 64, 0))
        put(backend, "plan_memory", self.plan_memory)
        put(backend, "identify", self.identify)
        put(backend, "load", self.load)
        put(backend, "tokenize", words)
        put(backend, "weight_pairs", weight_pairs)
        put(
            backend,
            "time_prefill",
            lambda model, n, batch, repeats, warmup, min_s=0.0: self.seconds(
                model, n, batch, repeats
            ),
        )
        put(
            backend,
            "time_decode",
            lambda model, n, steps, batch, repeats, warmup, min_s=0.0: self.seconds(
                model, steps, batch, repeats
            ),
        )
        put(
            backend,
            "run_batch",
            lambda model, n, steps, batch: self.seconds(model, steps, batch, 1),
        )
        return self


def words(model: str, path: Path) -> tuple[np.ndarray, None]:
    """Return the numbers of a text as its tokens."""
    return np.array(path.read_text().split(), np.int64), None


def weight_pairs(
    model: str, weights: str, *_: object
) -> Iterator[tuple[str, np.ndarray, np.ndarray, int]]:
    rng = np.random.default_rng(3)
    for i in range(3):
        exact = rng.normal(0, 1, (8, 8)).astype(np.float32)
        error = NOISE[weights] * rng.normal(0, 1, exact.shape).astype(np.float32)
        yield f"layers.{i}.attn.q.weight", exact, exact + error, int(64 * BITS[weights] / 8)


def installed() -> FakeEngine:
    """Install the fake, with folder, delay and failures from the environment."""
    HERE.rank, size = launched_as() or (0, 1)
    fake = FakeEngine(Path(os.environ["FAKE_FOLDER"]), size, float(os.environ["FAKE_DELAY_S"]))
    for part in os.environ.get("FAKE_FAILURES", "").split():  # where:weights:failure[@size]
        where, weights, text = part.split(":")
        failure, _, only_size = text.partition("@")
        if not only_size or int(only_size) == size:
            fake.failures[where, weights, "0"] = FAILURES[failure]
    return fake.install()


def _raise(error: BaseException) -> None:
    raise error


FAILURES: dict[str, Callable[[], None]] = {
    "hang": lambda: time.sleep(3600),
    "memory": lambda: _raise(MemoryError("no room")),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: (print("last words", flush=True), os._exit(7))[0],
}


def main() -> None:
    """Run the ``nbflow sweep`` command line in this process with the fake installed."""
    from nbflow import cli
    from nbflow_experiments.sweep import mpi_runner

    mpi_runner.PROGRAM = (sys.executable, __file__, "sweep")
    installed()
    cli.main()


if __name__ == "__main__":
    main()
