"""Quantize a model's checkpoint to a new file or folder."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbflow.checkpoint import WeightFile, open_weights
from nbflow.checkpoint.hub import AUXILIARY_FILES
from nbflow.checkpoint.quantization_config import CONFIG_KEYS
from nbflow.checkpoint.writers.gguf import write_gguf
from nbflow.checkpoint.writers.safetensors import write_safetensors
from nbflow.checkpoint.writers.tensor_plan import TensorPlan
from nbflow.conversion.format_rules import FormatRules
from nbflow.conversion.gguf import plan_gguf
from nbflow.conversion.importance_names import load_importance
from nbflow.conversion.packed_layouts import PackedLayout, parse_layout
from nbflow.conversion.plan import TensorConversion, attach_importance, plan_as_stored
from nbflow.quantization.importance import Importance
from nbflow.quantization.policy import WeightFormats
from nbflow.quantization.prepare import Prepared, parse_quantizer, prepare
from nbflow.spec import check, resolve
from nbflow.spec.resolve import ResolvedModel
from nbflow.utils.atomic_write import (
    check_output,
    replace_atomically,
    replace_folder_atomically,
)
from nbflow.utils.json_file import read_object
from nbflow_kernels.errors import UsageError
from nbflow_kernels.quantizers import DAMPING

_WEIGHTS = "model.safetensors"
_OTHER_FILES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".npz", ".h5", ".onnx"})
"""Suffixes of weight files that are not written; a folder would not be meant."""


@dataclass(frozen=True)
class WrittenCheckpoint:
    """The new checkpoint, or with ``dry_run`` its plan."""

    path: Path
    format: str
    tensors: tuple[TensorConversion, ...]
    notes: tuple[str, ...] = field(default=())
    """Notes for the user, e.g. on data that could not be converted."""

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.n_bytes for tensor in self.tensors)


def quantize_checkpoint(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: str | os.PathLike[str] | WeightFormats,
    *,
    rules: Iterable[str] = (),
    spec: str | os.PathLike[str] | None = None,
    quantizer: str = "auto",
    importance: str | os.PathLike[str] | Importance | None = None,
    act_order: bool = False,
    damping: float = DAMPING,
    force: bool = False,
    dry_run: bool = False,
) -> WrittenCheckpoint:
    """Write a model's checkpoint with its matrices in a weight format.

    Tensors are read, quantized and written in chunks of rows, to a temporary name in the same
    folder; the complete file or folder is then renamed.

    Parameters
    ----------
    model : str or path
        As for `nbflow.load`.
    out : str or path
        A ``.gguf`` file, a ``.safetensors`` file, or a folder, which gets ``model.safetensors`` and
        the configuration and tokenizer files.
    to : str, path or WeightFormats
        Format of the matrices of attention and feed-forward (`nbflow.quantization.policy`): a name
        of `nbflow_kernels.FORMATS`, or a policy file (``.toml``).  GGUF supports GGML's types and
        f32, f16, bf16.  "gptq", "awq" and "compressed-tensors" write a folder as these store it,
        ``gptq:uint4_g64`` with a grouped format other than theirs of 4 bits and groups of 128.
    rules : iterable of str
        ``PATTERN=FORMAT``: the first rule whose shell pattern matches a matrix's name decides.
        Names are those of the new file, or ours, ``layers.0.attn.q.weight``.
    spec : path, optional
        A spec file, as for `nbflow.load`.
    quantizer : str
        Quantizer of the matrices, as for `nbflow.load`.  "gptq" needs second moments as
        `importance` for every matrix in a block format.  "outliers" is not supported, as no file
        format can store outliers.
    importance : path or mapping, optional
        Error weights of the columns: a file of llama.cpp's ``imatrix``, safetensors, or name ->
        array (K,) or (experts, K); see `nbflow.quantization.importance.read_importance`.  Names
        are those of the new file, of the model's GGUF file, or ours.
    act_order : bool
        Let GPTQ process the columns with the largest inputs first.
    damping : float
        Added to the diagonal of second moments by GPTQ, relative to the mean of the diagonal.
    force : bool
        Replace `out` if it exists.
    dry_run : bool
        Return the plan without writing.

    Returns
    -------
    WrittenCheckpoint

    Raises
    ------
    UsageError
        If a name is unknown, a rule matches no matrix, rows are not whole blocks, a value is not
        finite or too large (the message names the tensor), `importance` is for other matrices,
        `out` exists or is named like another kind of weight file, or the new file cannot express
        the model.

    Examples
    --------
    >>> import tempfile, nbflow
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = nbflow.quantize_checkpoint("tiny_python", f"{folder}/q4", "q4")
    ...     with nbflow.open_weights(done.path) as weights:
    ...         weights.dtype("model.layers.0.self_attn.q_proj.weight")
    'q4_b32t1a'
    """
    if "outliers" in parse_quantizer(quantizer)[1]:
        raise UsageError(
            "quantizer 'outliers' stores weights outside of blocks, which no file format supports; "
            "use nbflow.load(..., quantizer='outliers')"
        )
    layout = parse_layout(to) if isinstance(to, str) else None
    if layout is not None:
        to = layout.format.name
    format_rules = FormatRules(to, rules)
    resolved = resolve(model, spec=spec)
    path = Path(out)
    if path.suffix in _OTHER_FILES:
        raise UsageError(
            f"{path}: {path.suffix} is not written; use .gguf, .safetensors or a folder"
        )
    if not format_rules.to:
        format_rules.formats.check_used(resolved.spec.tensor_shapes(), str(path))
    with open_weights(resolved.path) as file:
        check(resolved.spec, file)
        known: Importance | None = load_importance(importance, resolved, file)
        planned = plan_as_stored(resolved.spec, file, FormatRules(to, rules), blocks=False)
        formats = {own: t.format for t in planned if t.format != t.stored for own in t.ours}
        prepared = prepare(
            resolved.spec, file, formats.get, quantizer, known, act_order=act_order, damping=damping
        )
        if prepared.transforms:  # statistics under other names no longer hold
            known = {**prepared.quantizer.importance} or None
        resolved = dataclasses.replace(resolved, spec=prepared.spec)
        write = _write_gguf if path.suffix == ".gguf" else _write_safetensors
        source = prepared.apply_to(file)
        task = _Task(resolved, source, path, format_rules, prepared, known, force, dry_run, layout)
        done = write(task)
    return dataclasses.replace(done, notes=(*done.notes, *prepared.notes))


@dataclass(frozen=True)
class _Task:
    """Arguments of the writers."""

    resolved: ResolvedModel
    file: WeightFile
    out: Path
    rules: FormatRules
    prepared: Prepared
    importance: Importance | None
    force: bool
    dry_run: bool
    layout: PackedLayout | None


def _write_gguf(task: _Task) -> WrittenCheckpoint:
    out = task.out
    if task.layout is not None:
        raise UsageError(f"{out}: {task.layout.name} is a layout of folders, not of GGUF files")
    metadata, tensors, notes = plan_gguf(task.resolved, task.file, task.rules, str(out))
    tensors, more = attach_importance(tensors, task.importance)
    notes += [*more, *requantized_note(tensors)]
    _check_output(task)
    if not task.dry_run:
        with replace_atomically(out) as temporary, temporary.open("wb") as stream:
            write_gguf(stream, metadata, _plans(task, tensors))
    return WrittenCheckpoint(out, "gguf", tuple(tensors), tuple(notes))


def _plans(task: _Task, tensors: Iterable[TensorConversion]) -> list[TensorPlan]:
    return [tensor.plan(task.prepared.quantizer) for tensor in tensors]


def _check_output(task: _Task, may_hold: frozenset[str] = frozenset()) -> None:
    """Raise if the output must not be written, or is one of the files to be read."""
    for original in {task.resolved.path, *task.file.files()}:
        check_output(task.out, original, force=task.force or task.dry_run, may_hold=may_hold)


def _write_safetensors(task: _Task) -> WrittenCheckpoint:
    """Write one file, or a folder with configuration and tokenizer."""
    resolved, file, out = task.resolved, task.file, task.out
    if file.format not in ("safetensors", "pickle"):
        raise UsageError(
            f"{out}: a {file.format} file includes the model's configuration, which safetensors "
            "cannot store; write a .gguf file"
        )
    planned = plan_as_stored(resolved.spec, file, task.rules)
    tensors, notes = attach_importance(planned, task.importance)
    source = resolved.path if resolved.path.is_dir() else resolved.path.parent
    companions = [source / name for name in AUXILIARY_FILES if (source / name).is_file()]
    is_file = out.suffix == ".safetensors"
    unties = resolved.spec != task.prepared.before[0] if task.prepared.before else False
    notes += requantized_note(tensors)
    if is_file and not (out.parent / "config.json").is_file():
        notes.append("loading the file requires config.json in the same folder")
    if is_file and unties:
        notes.append("config.json in the same folder must say tie_word_embeddings = false")
    plans, stated = _plans(task, tensors), None
    if task.layout is not None:
        if is_file or not (source / "config.json").is_file():
            raise UsageError(
                f"{out}: {task.layout.name} needs a folder, whose config.json states it"
            )
        stated = task.layout.config(task.layout.unchanged(plans))
        plans = task.layout.plans(plans)
    done = WrittenCheckpoint(out, "safetensors", tuple(tensors), tuple(notes))
    may_hold = frozenset() if is_file else frozenset({*AUXILIARY_FILES, _WEIGHTS})
    _check_output(task, may_hold)
    if task.dry_run:
        return done
    if is_file:
        with replace_atomically(out) as temporary, temporary.open("wb") as stream:
            write_safetensors(stream, plans)
        return done
    with replace_folder_atomically(out) as folder:
        for original in companions:
            shutil.copyfile(original, folder / original.name)
        _change_config(folder / "config.json", unties, stated)
        with (folder / _WEIGHTS).open("wb") as stream:
            write_safetensors(stream, plans)
    return done


def _change_config(path: Path, unties: bool, quantization: dict[str, Any] | None) -> None:
    """Update a config.json: untied head, the new quantization or none."""
    old = read_object(path, missing_ok=True)
    if old is None:
        return
    new = {key: value for key, value in old.items() if key not in CONFIG_KEYS}
    if unties:
        new["tie_word_embeddings"] = False
    if quantization is not None:
        new["quantization_config"] = quantization
    if new != old:
        path.write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")


def requantized_note(tensors: Iterable[TensorConversion]) -> list[str]:
    """Return a note on tensors that lose precision a second time, if any."""
    n = sum(tensor.is_requantized for tensor in tensors)
    return [f"{n} tensors were in blocks before and lose precision a second time"] if n else []
