"""Sweep points: frozen configuration and content-derived id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbflow_experiments import backend
from nbflow_experiments.config.sweep_file import Sweep
from nbflow_experiments.measures import METRICS_VERSION, needs_text
from nbflow_experiments.settings import OFFLOAD_SETTINGS, SETTINGS, Value, highest_rank
from nbflow_kernels.errors import UsageError
from nbflow_kernels.plugins import load_plugins

FORMAT_SETTINGS = ("weights", "outliers", "quantizer", "importance")
"""Settings that, with the model, determine the quantized weights."""
_EVALUATION = ("eval_text", "eval_tokens", "eval_window", "eval_context", "seed")
_LENGTHS = (
    *("batch", "prompt", "decode", "prefix", "shared_keys", "own_keys", "heads"),
    *("draft", "n_draft", "repeats", "warmup", "min_repetition_s"),
)
LOAD_SETTINGS = tuple(name for name in SETTINGS if name not in (*_EVALUATION, *_LENGTHS))
"""Settings that determine the loaded model."""
QUALITY_SETTINGS = (*LOAD_SETTINGS, *_EVALUATION)
"""Settings that determine the quality measures: all but batch and lengths."""


@dataclass(frozen=True)
class Point:
    """Point of a sweep, ready to run."""

    id: str
    """sha256 of the canonical JSON of all inputs of the result."""
    config: dict[str, Value]
    measures: tuple[str, ...]
    model_digest: str
    """sha256 of the model's files."""
    dataset_digest: str
    """sha256 of the evaluated text; empty if no measure reads it."""
    text: Path | None
    format_digest: str = ""
    """Digest of the files that determine the weights: source of a registered format, policy,
    importances; empty without any."""
    plugins_sha256: tuple[str, ...] = ()
    """Digests of the plugins that register anything but formats, which count above."""

    @property
    def short(self) -> str:
        """Return the name of the point's folder."""
        return self.id[:12]

    def key(self, names: Iterable[str]) -> tuple[Value, ...]:
        """Return the values of some settings as a comparison key."""
        return tuple(self.config[name] for name in names)

    def record(self) -> dict[str, Any]:
        """Return the data hashed into the id."""
        return _identity(
            self.config, self.measures, self.model_digest, self.dataset_digest, self.format_digest,
            self.plugins_sha256,
        )  # fmt: skip


def _identity(
    config: Mapping[str, Value], measures: tuple[str, ...], model: str, dataset: str, format: str,
    plugins: tuple[str, ...],
) -> dict[str, Any]:  # fmt: skip
    """Return the inputs of a point's result as plain data.

    Settings of offload count where they are given: points without them keep their ids.
    """
    identity = {
        "config": {n: value for n, value in config.items() if value or n not in OFFLOAD_SETTINGS},
        "measures": list(measures),
        "model_sha256": model,
        "dataset_sha256": dataset,
        "metrics_version": METRICS_VERSION,
    }
    identity |= {"format_digest": format} if format else {}
    return identity | ({"plugins_sha256": list(plugins)} if plugins else {})


def _plugin_digests(sweep: Sweep) -> tuple[str, ...]:
    """Return the digests of the plugins that register anything but formats."""
    plugins = load_plugins(sweep.plugins)
    return tuple(
        sorted(
            plugin.sha256
            for plugin in plugins
            if any(each.kind != "format" for each in plugin.registered)
        )
    )


def point_id(identity: Mapping[str, Any]) -> str:
    """Return the id of a point.

    Examples
    --------
    >>> point_id({"b": 1, "a": "x"}) == point_id({"a": "x", "b": 1})
    True
    """
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def make_points(sweep: Sweep) -> list[Point]:
    """Freeze the points of a sweep, in the order in which they run.

    Points that share a loaded model are adjacent; otherwise the file's order holds.
    """
    identities: dict[str, backend.ModelIdentity] = {}
    digests: dict[Path, str] = {}
    points: dict[str, Point] = {}
    plugins = _plugin_digests(sweep)
    for config in sweep.points:
        model = str(config["model"])
        if model not in identities:
            identities[model] = backend.identify(model)
        if not config["weights"]:
            stored = backend.stores_blocks(model)
            config = {**config, "weights": backend.STORED if stored else "f32"}
        _check_lengths(config, identities[model])
        text, dataset = None, ""
        if needs_text(sweep.measures):
            _check_window(config, identities[model])
            text = backend.evaluation_text(
                str(config["eval_text"]), identities[model], sweep.folder
            )
            if text not in digests:
                digests[text] = hashlib.sha256(text.read_bytes()).hexdigest()
            dataset = digests[text]
        digest = identities[model].digest
        format = backend.format_digest(str(config["weights"]), str(config["importance"]))
        name = point_id(_identity(config, sweep.measures, digest, dataset, format, plugins))
        points[name] = Point(
            name, dict(config), sweep.measures, digest, dataset, text, format, plugins
        )
    groups: dict[tuple[Value, ...], list[Point]] = {}
    for point in points.values():
        groups.setdefault(point.key(LOAD_SETTINGS), []).append(point)
    return [point for group in groups.values() for point in group]


def _check_lengths(config: Mapping[str, Value], identity: backend.ModelIdentity) -> None:
    """Raise if a sequence of the point is longer than its context."""
    longest = int(config["max_context"]) or identity.max_context
    if longest > identity.max_context:
        raise UsageError(
            f"max_context must be at most {identity.max_context}, the context of "
            f"{identity.model}, got {longest}"
        )
    asked = int(config["prompt"]) + 1 + int(config["decode"])
    if asked > longest:
        raise UsageError(
            f"prompt + 1 + decode must be at most {longest} tokens, the context of "
            f"{identity.model}, got {config['prompt']} + 1 + {config['decode']} = {asked}"
        )


def _check_window(config: Mapping[str, Value], identity: backend.ModelIdentity) -> None:
    """Raise if an evaluated window is longer than the point's context."""
    longest = int(config["max_context"]) or identity.max_context
    if int(config["eval_window"]) > longest:
        raise UsageError(
            f"eval_window must be at most {longest} tokens, the context of {identity.model}, "
            f"got {config['eval_window']}"
        )


def check_world(points: Iterable[Point], size: int) -> None:
    """Raise if a partition needs more ranks than available.

    Without mpirun (`size` 1) every partition runs on in-process ranks, unless the point sets the
    number of ranks to start.
    """
    for point in points:
        ranks = int(point.config["ranks"])
        highest = highest_rank(point.config)
        if ranks:
            if size not in (1, ranks):
                raise UsageError(
                    f"a point has ranks = {ranks}, but mpirun started {size} ranks; start nbflow "
                    f"sweep without mpirun: it starts the ranks of each point itself"
                )
            if highest >= ranks:
                raise UsageError(
                    f"partition {point.config['partition']!r} names rank {highest}, so it needs "
                    f"ranks = {highest + 1}, got {ranks}; ranks = 'auto' counts them, [[exclude]] "
                    f"leaves points out"
                )
        elif size > 1 and highest >= size:
            raise UsageError(
                f"partition {point.config['partition']!r} names rank {highest}, but mpirun started "
                f"{size} ranks (0 to {size - 1}); start with: mpirun -n {highest + 1} ..."
            )


def estimate_bytes(point: Point) -> dict[str, int]:
    """Return the bytes of weights, KV cache and states of a point, as the planner counts them.

    Sum over ranks; replicated tensors count once.
    """
    config = point.config
    model, *formats = (str(config[name]) for name in ("model", "weights", "kv", "state"))
    weights, kv_token, states = backend.model_bytes(
        model, formats[0], float(config["outliers"]), *formats[1:]
    )
    batch = int(config["batch"])
    tokens = batch * (int(config["prompt"]) + int(config["decode"]))
    return {
        "weight_bytes": weights,
        "kv_bytes": tokens * kv_token,
        "state_bytes": batch * states,
    }
