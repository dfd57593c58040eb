"""Engine interface of the sweeps."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import nbflow_kernels as nk
from nbflow.distributed import Comm, SelfComm, ranks_of, world
from nbflow.option_fields import fields
from nbflow.options import LoadOptions
from nbflow_kernels.errors import UsageError

if TYPE_CHECKING:
    from nbflow.engine.llm import LLM
    from nbflow.planner.memory_plan import MemoryPlan

DEVICES = ("cpu", "cuda", "emulator")
"""Names of devices; cuda:N is device N."""
AUTO = "auto"
"""Partition setting that lets the planner choose."""
STORED = "stored"
"""Setting of weights that keeps the formats of the checkpoint."""
MAX_TEXT_BYTES = 1 << 30
"""Longest text that is tokenized."""
MEASURED = "measured"
"""Machine setting that measures the sweep's own machine."""

__all__ = ["Comm", "SelfComm", "world"]


@dataclass(frozen=True)
class ModelIdentity:
    """Resolved model, without its weights."""

    model: str
    digest: str
    """sha256 over the weights, the configuration and the tokenizer."""
    folder: Path
    """Folder of the weights, which may contain ``eval.txt``."""
    max_context: int
    vocab_size: int


def format_names() -> tuple[str, ...]:
    """Return the names of the weight formats, short names included."""
    return (*nk.FORMATS.short_names, *nk.FORMATS)


def is_policy(name: str) -> bool:
    """Return whether a name is a policy, or its file, rather than a weight format."""
    from nbflow.quantization import policy

    return policy.is_policy(name)


def policy_bits(file: str) -> float:
    """Return the bits per weight stated by a policy file, else the mean over its formats."""
    from nbflow.quantization.policy import weight_formats

    formats = weight_formats(file)
    assert formats is not None
    stated = (formats.facts or {}).get("bits_per_weight")
    if isinstance(stated, int | float):
        return float(stated)
    return sum(bits_per_weight(format) for _, format in formats.patterns) / len(formats.patterns)


def is_weight_format(name: str) -> bool:
    """Return whether a name is that of a weight format, or "stored"."""
    return name.lower() == STORED or name in nk.FORMATS


@functools.cache
def stored_bits(model: str) -> float:
    """Return the mean bits per weight of the matrices of layers as the checkpoint stores them."""
    from nbflow.planner import planned_model
    from nbflow.quantization.policy import is_matrix

    planned = planned_model(model)
    shapes = planned.spec.tensor_shapes()
    names = [n for n, shape in shapes.items() if n.startswith("layers.") and is_matrix(n, shape)]
    sizes = [math.prod(shapes[name]) for name in names]
    bits = sum(planned.bits(name) * size for name, size in zip(names, sizes, strict=True))
    return bits / max(1, sum(sizes))


def stores_blocks(model: str) -> bool:
    """Return whether a checkpoint stores matrices in block formats."""
    from nbflow.planner import planned_model

    return any(nk.FORMATS[name].block_size > 1 for name in planned_model(model).matrix_formats)


def bits_per_weight(name: str, model: str = "") -> float:
    """Return the bits per weight of a format, or of a model as it is stored."""
    if name == STORED:
        return stored_bits(model)
    if is_policy(name):
        return policy_bits(name)
    return float(nk.FORMATS[name].bits_per_weight)


def is_float_format(name: str) -> bool:
    """Return whether a weight format is an element-wise float format."""
    return name != STORED and not is_policy(name) and int(nk.FORMATS[name].block_size) == 1


def format_digest(name: str, importance: str = "") -> str:
    """Return the digest of the files that determine the stored weights.

    These are the source of a registered format, a policy, importances; empty without any.
    """
    from nbflow.quantization.policy import is_policy_file

    read = (name if is_policy_file(name) else "", importance)
    files = [Path(file) for file in read if file]
    known = name == STORED or is_policy(name)
    own = "" if known else str(getattr(nk.FORMATS[name], "digest", ""))
    return "+".join([own] * bool(own) + [digest_files([file]) for file in files])


def check_kv(kv: str) -> None:
    """Raise unless formats of the key/value cache exist, by layer or for all."""
    from nbflow.spec.kv_formats import parse_kv

    parse_kv(kv)


@functools.cache
def model_bytes(
    model: str, weights: str, outliers: float, kv: str, state: str
) -> tuple[int, int, int]:
    """Return the planner's bytes of a model.

    They are those of its weights, of its KV cache per token, and of its states per sequence.
    """
    from nbflow.planner import planned_model
    from nbflow.planner.memory import model_bytes as planned_bytes

    return planned_bytes(planned_model(model, weights).with_state_format(state), kv, outliers)


def plan_memory(config: Mapping[str, Any], partition: str) -> MemoryPlan:
    """Return the memory that a point takes on each rank, from the model's header."""
    from nbflow.planner.memory_plan import RunSize
    from nbflow.planner.memory_plan import plan_memory as plan

    names = (
        "weights", "outliers", "quantizer", "kv", "state", "activations", "all_reduce", "device",
    )  # fmt: skip
    more = ("kv_host_percent", "cpu_layers", "max_context")
    options = {name: config[name] for name in (*names, *more) if config[name]}
    options["embeddings_on_host"] = bool(config["embeddings_on_host"])
    if config["cpu_layers"]:  # the loaded model's partition has a rank for them
        partition = str(config["partition"])
    run = RunSize(*(int(config[name]) for name in ("batch", "prompt", "decode")))
    return plan(str(config["model"]), run=run, partition=partition, **options)


def partition_ranks(partition: str) -> tuple[int, ...]:
    """Return the numbers of the ranks that a partition string names; "auto" goes with any."""
    return (0,) if partition == AUTO else ranks_of(partition)


def choices() -> dict[str, tuple[str, ...]]:
    """Return the accepted values of enumerated settings."""
    known = fields(LoadOptions)
    names = ("kv_rotation", "state", "kv_keys", "activations", "all_reduce", "optimize")
    return {name: known[name].choices for name in names}


def check_machine(name: str) -> None:
    """Raise unless a machine description of this name or path exists, or none is meant."""
    from nbflow.planner import load_machine

    if name not in ("", MEASURED):
        load_machine(name)


def check_quantizer(name: str) -> None:
    """Raise unless the quantizers and transforms of a name exist."""
    from nbflow.quantization.prepare import parse_quantizer

    parse_quantizer(name)


def identify(model: str) -> ModelIdentity:
    """Return the identity of a model; reads every byte of its files once."""
    from nbflow.checkpoint import open_weights
    from nbflow.spec import resolve

    resolved = resolve(model)
    with open_weights(resolved.path) as weights:
        files = [Path(file) for file in weights.files()]
    folder = files[0].parent
    if resolved.tokenizer is not None and resolved.tokenizer not in files:  # GGUF holds both
        files.append(resolved.tokenizer)
    files += [folder / "config.json"] if (folder / "config.json").is_file() else []
    spec = resolved.spec
    return ModelIdentity(model, digest_files(files), folder, spec.max_context, spec.vocab_size)


def digest_files(files: Sequence[Path]) -> str:
    """Return the sha256 over the names and contents of files, independent of their order."""
    total = hashlib.sha256()
    for file in sorted(set(files), key=lambda f: f.name):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        total.update(f"{file.name} {content}\n".encode())
    return total.hexdigest()


def load(model: str, *, comm: Comm | None = None, **settings: str | float) -> LLM:
    """Load a model with a sweep's settings as options of `nbflow.load`.

    An empty text, and 0 where the option's default is None, select the default.
    """
    import nbflow

    known = fields(LoadOptions)
    unset = {name for name, value in settings.items() if known[name].default is None and not value}
    unset |= {"machine"} if settings.get("machine") == MEASURED else set()
    given: dict[str, Any] = {
        name: bool(value) if known[name].default is False else value
        for name, value in settings.items()
        if name not in unset
    }
    return nbflow.load(model, LoadOptions().replaced(given), comm=comm)


def time_prefill(
    model: LLM, n_prompt: int, batch: int, repeats: int, warmup: int, min_s: float = 0.0
) -> list[float]:
    """Return the mean seconds of a prefill in each repetition of at least `min_s` seconds."""
    from nbflow.benchmark import timing

    return timing.time_prefill(model, n_prompt, batch, repeats, warmup, min_s)


def time_decode(
    model: LLM, n_prompt: int, n_gen: int, batch: int, repeats: int, warmup: int, min_s: float = 0.0
) -> list[float]:
    """Return the mean seconds of decoding `n_gen` tokens per sequence, as `time_prefill` does."""
    from nbflow.benchmark import timing

    return timing.time_decode(model, n_prompt, n_gen, batch, repeats, warmup, min_s)


def run_batch(model: LLM, n_prompt: int, n_gen: int, batch: int) -> None:
    """Compute a batch's prompts, whatever the prefix cache holds, and `n_gen` decode steps."""
    from nbflow.benchmark import timing

    timing.time_both(model, n_prompt, n_gen, batch)


def weight_pairs(
    model: str, weights: str, outliers: float = 0.0, quantizer: str = "auto", importance: str = ""
) -> Iterator[tuple[str, np.ndarray, np.ndarray, int]]:
    """Yield canonical name, exact float32 values, dequantized values and stored bytes.

    Only tensors that the engine quantizes; one tensor is in memory at a time.  Exact values are the
    checkpoint's, after the quantizer's weight transform if it has one.
    """
    from nbflow.conversion.quantized_matrices import quantized_matrices

    found = quantized_matrices(
        model, weights, quantizer=quantizer, importance=importance or None, outliers=outliers
    )
    for name, exact, quantized in found:
        yield name, exact, nk.dequantize(quantized), int(quantized.nbytes)


def evaluation_text(setting: str, identity: ModelIdentity, sweep_folder: Path) -> Path:
    """Return the evaluation text of a point."""
    if setting:
        path = Path(setting) if Path(setting).is_absolute() else sweep_folder / setting
        if not path.is_file():
            raise UsageError(f"eval_text: the file {path} does not exist")
        return path
    path = identity.folder / "eval.txt"
    if not path.is_file():
        raise UsageError(
            f"{identity.model} brings no eval.txt; name a text with --eval-text FILE, or in the "
            "sweep file with [settings] eval_text = ..."
        )
    return path


def text_file(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str] | None = None,
    spec: str | None = None,
    reference: str | None = None,
) -> Path:
    """Return `text`, or the ``eval.txt`` in the folder of a model's weights, which are not read.

    A model without one, e.g. a quantized checkpoint, has that of its `reference`.
    """
    from nbflow.spec import resolve

    if text is not None:
        path = Path(text)
        if not path.is_file():
            raise UsageError(f"text: the file {path} does not exist")
        return path
    weights = resolve(model, spec=spec).path
    path = (weights if weights.is_dir() else weights.parent) / "eval.txt"
    if path.is_file():
        return path
    if reference is not None:
        return text_file(reference)
    raise UsageError(f"{model} brings no eval.txt; name a text with --text FILE (text=)")


def tokenize(model: str, path: Path) -> tuple[np.ndarray, int | None]:
    """Return the ids of a text file, int64 (N,), and the BOS id if inputs begin with it.

    Raises `UsageError` if the file is longer than `MAX_TEXT_BYTES`, or not UTF-8.
    """
    import nbflow
    from nbflow.utils.binary_file import read_text

    tokenizer = nbflow.load_tokenizer(model)
    ids = np.asarray(tokenizer.encode(read_text(path, MAX_TEXT_BYTES, "a text")), np.int64)
    begun = tokenizer.encode("a", add_special_tokens=True)
    bos = tokenizer.bos_id
    return ids, bos if bos is not None and begun and begun[0] == bos else None
