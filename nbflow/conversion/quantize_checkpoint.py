"""`quantize_checkpoint`: from a model to a new checkpoint in a weight format."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from nbflow.checkpoint import WeightFile, open_weights
from nbflow.checkpoint.hub import AUXILIARY_FILES
from nbflow.checkpoint.quantization_config import CONFIG_KEYS
from nbflow.checkpoint.writers.gguf import write_gguf
from nbflow.checkpoint.writers.safetensors import write_safetensors
from nbflow.conversion.gguf import plan_gguf
from nbflow.conversion.importance_names import known_inputs
from nbflow.conversion.plan import FormatRules, TensorPlan, plan_as_stored
from nbflow.quantization.importance import Importance, weigh
from nbflow.quantization.policy import WeightFormats
from nbflow.quantization.transforms import Prepared, check_encoder, prepare
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


@dataclass(frozen=True)
class WrittenCheckpoint:
    """What was written, or with ``dry_run`` would be."""

    path: Path
    """The file or the folder."""
    format: str
    """Its file format: safetensors or gguf."""
    tensors: tuple[TensorPlan, ...]
    """Its tensors, in order."""
    notes: tuple[str, ...] = field(default=())
    """What the user should know: what could not be taken along."""

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
    encoder: str = "best",
    importance: str | os.PathLike[str] | Importance | None = None,
    act_order: bool = False,
    damping: float = DAMPING,
    force: bool = False,
    dry_run: bool = False,
) -> WrittenCheckpoint:
    """Write a model's checkpoint with its matrices in a weight format.

    The tensors are read, converted and written some rows at a time.  The new file or folder gets
    its name when it is complete; before, it has a temporary one beside it.

    Parameters
    ----------
    model : str or path
        What `nbflow.load` takes.
    out : str or path
        A ``.gguf`` file, a ``.safetensors`` file, or a folder, which gets ``model.safetensors`` and
        the configuration and tokenizer files.
    to : str, path or WeightFormats
        Format of the matrices of attention and feed-forward (`nbflow.quantization.policy`): a name
        of `nbflow_kernels.FORMATS`, or a policy file (``.toml``).  GGUF takes GGML's types and f32,
        f16, bf16.
    rules : iterable of str
        ``PATTERN=FORMAT``: the first whose shell pattern matches a matrix's name decides on it.
        Names are those of the new file, or ours, ``layers.0.attn.q.weight``.
    spec : path, optional
        A spec file, as for `nbflow.load`.
    encoder : str
        How matrices are put into their formats, as for `nbflow.load`.  "gptq" needs second moments
        as `importance`, for every matrix that is put into blocks.  "outliers" keeps weights for
        which files have no place.
    importance : path or mapping, optional
        How much the squared error of each column counts: a file of llama.cpp's ``imatrix``,
        safetensors, or name -> array (K,) or (experts, K); see
        `nbflow.quantization.importance.read_importance`.  Names are those of the new file, of the
        model's GGUF file, or ours.
    act_order : bool
        Whether GPTQ takes the columns with the largest inputs first.
    damping : float
        What GPTQ adds to the diagonal of second moments, in units of its mean.
    force : bool
        Whether `out` may be replaced.
    dry_run : bool
        Only return what would be written.

    Returns
    -------
    WrittenCheckpoint

    Raises
    ------
    UsageError
        If a name is unknown, a rule is for no matrix, rows are no whole blocks, a value is not
        finite or too large (the message names the tensor), `importance` is for other matrices,
        `out` exists, or the new file could not say what the model computes.

    Examples
    --------
    >>> import tempfile, nbflow
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = nbflow.quantize_checkpoint("tiny_python", f"{folder}/q4", "q4", encoder="plain")
    ...     with nbflow.open_weights(done.path) as weights:
    ...         weights.dtype("model.layers.0.self_attn.q_proj.weight")
    'q4_b32t1a'
    """
    if "outliers" in check_encoder(encoder)[1]:
        raise UsageError(
            "encoder 'outliers' keeps weights beside the blocks, for which files have no place; "
            "nbflow.load(..., encoder='outliers') and sweeps do it"
        )
    choice = FormatRules(to, rules)
    resolved = resolve(model, spec=spec)
    path = Path(out)
    if not choice.to:
        choice.formats.check_used(resolved.spec.tensor_shapes(), str(path))
    with open_weights(resolved.path) as file:
        check(resolved.spec, file)
        known: Importance | None = known_inputs(importance, resolved, file)
        planned = plan_as_stored(resolved.spec, file, FormatRules(to, rules), blocks=False)
        formats = {own: t.format for t in planned if t.format != t.stored for own in t.ours}
        prepared = prepare(
            resolved.spec, file, formats.get, encoder, known, act_order=act_order, damping=damping
        )
        if prepared.foldings:  # what is known about the inputs is so no longer under other names
            known = {**prepared.encoding.importance} or None
        resolved = dataclasses.replace(resolved, spec=prepared.spec)
        write = _write_gguf if path.suffix == ".gguf" else _write_safetensors
        task = _Task(resolved, prepared.opened(file), path, choice, prepared, known, force, dry_run)
        done = write(task)
    return dataclasses.replace(done, notes=(*done.notes, *prepared.notes))


@dataclass(frozen=True)
class _Task:
    """What is to be written."""

    resolved: ResolvedModel
    file: WeightFile
    out: Path
    choice: FormatRules
    prepared: Prepared
    importance: Importance | None
    force: bool
    dry_run: bool


def _write_gguf(task: _Task) -> WrittenCheckpoint:
    """Write one GGUF file."""
    out = task.out
    metadata, tensors, notes = plan_gguf(task.resolved, task.file, task.choice, str(out))
    tensors, more = weigh(tensors, task.importance)
    notes += [*more, *twice_note(tensors)]
    _check_output(task)
    if not task.dry_run:
        with replace_atomically(out) as temporary, temporary.open("wb") as stream:
            write_gguf(stream, metadata, tensors, task.prepared.encoding)
    return WrittenCheckpoint(out, "gguf", tuple(tensors), tuple(notes))


def _check_output(task: _Task, may_hold: frozenset[str] = frozenset()) -> None:
    """Raise if the output must not be written; it must be none of the files that are read."""
    for original in {task.resolved.path, *task.file.files()}:
        check_output(task.out, original, force=task.force or task.dry_run, may_hold=may_hold)


def _write_safetensors(task: _Task) -> WrittenCheckpoint:
    """Write one file, or a folder with everything that goes with it."""
    resolved, file, out = task.resolved, task.file, task.out
    if file.format not in ("safetensors", "pickle"):
        raise UsageError(
            f"{out}: a {file.format} file holds the model's configuration itself, and safetensors "
            "has no place for it; write a .gguf file"
        )
    tensors, notes = weigh(plan_as_stored(resolved.spec, file, task.choice), task.importance)
    source = resolved.path if resolved.path.is_dir() else resolved.path.parent
    beside = [source / name for name in AUXILIARY_FILES if (source / name).is_file()]
    is_file = out.suffix == ".safetensors"
    unties = resolved.spec != task.prepared.before[0] if task.prepared.before else False
    notes += _notes(tensors, out, is_file)
    if is_file and unties:
        notes.append("config.json beside the file must say tie_word_embeddings = false")
    done = WrittenCheckpoint(out, "safetensors", tuple(tensors), tuple(notes))
    may_hold = frozenset() if is_file else frozenset({*AUXILIARY_FILES, _WEIGHTS})
    _check_output(task, may_hold)
    if task.dry_run:
        return done
    encoding = task.prepared.encoding
    if is_file:
        with replace_atomically(out) as temporary, temporary.open("wb") as stream:
            write_safetensors(stream, tensors, encoding)
        return done
    with replace_folder_atomically(out) as folder:
        for original in beside:
            shutil.copyfile(original, folder / original.name)
        _change_config(folder / "config.json", unties)
        with (folder / _WEIGHTS).open("wb") as stream:
            write_safetensors(stream, tensors, encoding)
    return done


def _change_config(path: Path, unties: bool) -> None:
    """Say in a config.json what is other than in the original: a head, FP8 no longer."""
    old = read_object(path, missing_ok=True)
    if old is None:
        return
    new = {key: value for key, value in old.items() if key not in CONFIG_KEYS}
    if unties:
        new["tie_word_embeddings"] = False
    if new != old:
        path.write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")


def _notes(tensors: list[TensorPlan], out: Path, is_file: bool) -> list[str]:
    """Return what the user should know about a safetensors file."""
    notes = twice_note(tensors)
    if is_file and not (out.parent / "config.json").is_file():
        notes.append("config.json must lie beside the file for it to be loaded")
    return notes


def twice_note(tensors: Iterable[TensorPlan]) -> list[str]:
    """Return a note on tensors that lose precision a second time, if there are any."""
    n = sum(tensor.is_twice for tensor in tensors)
    return [f"{n} tensors were in blocks before and lose precision a second time"] if n else []
