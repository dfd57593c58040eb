"""Sharded checkpoints: the folder and the index of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from nbflow.checkpoint.grouped_config import read_config
from nbflow.checkpoint.quantization_config import FLOAT8, read_quantization, with_scales
from nbflow.checkpoint.weight_file import TensorEntry, WeightFile
from nbflow.utils.binary_file import ByteFile
from nbflow.utils.json_file import read_object
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
NAMES = (INDEXES[0], "model.safetensors", INDEXES[1], "pytorch_model.bin")
"""Weights of a Hugging Face folder, in order of preference."""

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Weights of an adapter, as PEFT names them."""

_CODES = {*FLOAT8, "i8"}
_CODE_NAMES = (
    "_blocks", ".qweight", ".weight_packed", "__nf4", "__fp4", ".weight_scale", ".W_q", "_qdata",
)  # fmt: skip
"""Types and names of tensors whose values need those of other tensors."""
SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
"""Suffixes of weight files."""


def find_in_folder(folder: Path) -> Path:
    """Return the index or the only file of a Hugging Face folder."""
    for name in NAMES:
        if (folder / name).is_file():
            names = [path.name for path in folder.iterdir()]
            refuse_embedded_adapter(str(folder), names, f"give the path {folder / name}")
            return folder / name
    refuse_adapter(folder)
    weights = sorted(p.name for p in folder.glob("*") if p.suffix in SUFFIXES)
    found = f"; to read a file of it, name the file: {', '.join(weights[:8])}" if weights else ""
    raise UsageError(
        f"{folder}: the folder must hold {NAMES[1]} or {NAMES[3]}, or the index of either{found}"
    )


def refuse_adapter(folder: Path) -> None:
    """Raise for a folder with an adapter (LoRA and the like) of a model."""
    if (folder / "adapter_config.json").is_file():
        raise UsageError(
            f"{folder}: holds an adapter (adapter_config.json), not a model; merge it into its "
            "base model and save that: peft's model.merge_and_unload().save_pretrained(FOLDER)"
        )


def refuse_embedded_adapter(where: str, names: Iterable[str], choice: str) -> None:
    """Raise for a model whose folder also holds the weights of an adapter.

    transformers applies such an adapter, vLLM runs the base model: neither is chosen silently.  An
    adapter_config.json without weights, as merging leaves it behind, changes nothing.  `choice`
    tells users how to state that the base model is meant.
    """
    held = set(names)
    adapter = next((name for name in ADAPTER_WEIGHTS if name in held), None)
    if adapter and "adapter_config.json" in held:
        raise UsageError(
            f"{where}: holds a model and an adapter of it ({adapter}), which would not be applied; "
            f"to use the model without the adapter, {choice}; to use both, merge them: peft's "
            "model.merge_and_unload().save_pretrained(FOLDER)"
        )


def open_checkpoint(
    path: Path, format: str, read_header: Callable[[ByteFile], list[TensorEntry]]
) -> WeightFile:
    """Open an index with its shards, or one file, with the config.json of its folder.

    `read_header` returns the tensors of one file.
    """
    entries: list[TensorEntry] = []
    files: list[ByteFile] = []
    try:
        if path.name.endswith(".index.json"):
            open_shards(path, read_header, files, entries)
        else:
            files.append(ByteFile(path))
            entries += read_header(files[0])
        config_path = path.parent / "config.json"
        entries, scales = _joined(entries, config_path)
    except BaseException:
        for file in files:
            file.close()
        raise
    return WeightFile(path, format, entries, files, lambda: read_config(config_path), scales)


def _joined(
    entries: list[TensorEntry], config_path: Path
) -> tuple[list[TensorEntry], list[TensorEntry]]:
    """Return the tensors joined with their scales, and the scales.

    With an unknown quantization all stay separate: they can be listed, and `nbflow.spec.resolve`
    reports the error to users who run the model.
    """
    if not any(e.dtype in _CODES or e.name.endswith(_CODE_NAMES) for e in entries):
        return entries, []
    config = read_config(config_path) or {}
    try:
        quantization = read_quantization(config, str(config_path))
    except UsageError:
        quantization = None
    return (entries, []) if quantization is None else with_scales(entries, quantization)


def open_shards(
    index: Path,
    read_header: Callable[[ByteFile], list[TensorEntry]],
    files: list[ByteFile],
    entries: list[TensorEntry],
) -> None:
    """Open all shards of an index and check their tensors.

    Opened files (also before an error) and tensors are appended to `files` and `entries`.
    """
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{index}: weight_map must be a table of tensor names and file names")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard in {"", ".", ".."} or Path(shard).name != shard:
            raise UsageError(
                f"{index}: weight_map of tensor {shown(name)} must be a file name, "
                f"got {shown(shard)}"
            )
        shards.setdefault(shard, []).append(name)
    missing = [shard for shard in shards if not _is_file(index.parent / shard)]
    if missing:
        raise UsageError(
            f"{index}: {len(missing)} of {len(shards)} shards are missing: "
            f"{', '.join(map(shown, missing[:8]))}"
        )
    seen: dict[str, str] = {}
    for shard, names in shards.items():
        files.append(ByteFile(index.parent / shard))
        held = read_header(files[-1])
        absent = set(names) - {entry.name for entry in held}
        if absent:
            raise UsageError(
                f"{files[-1].path}: {len(absent)} tensors that {index.name} promises are not in "
                f"the file, the first is {shown(min(absent))}"
            )
        for entry in held:
            if entry.name in seen:
                raise UsageError(
                    f"{index}: tensor {shown(entry.name)} is in both {seen[entry.name]} and {shard}"
                )
            seen[entry.name] = shard
        entries += held


def _is_file(path: Path) -> bool:
    """Return whether a file exists; False for names that the system refuses."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False
