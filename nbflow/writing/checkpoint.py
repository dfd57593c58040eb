"""`quantize_checkpoint`: from a model to a new checkpoint in a weight format."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from nbflow.hub import BESIDE
from nbflow.spec import check, resolve
from nbflow.spec.resolve import ResolvedModel
from nbflow.weights import WeightFile, open_weights
from nbflow.writing.gguf_checkpoint import plan_gguf
from nbflow.writing.gguf_file import write_gguf
from nbflow.writing.importance import Importance, read_importance, weigh
from nbflow.writing.importance_names import gguf_names, with_our_names
from nbflow.writing.output import check_output, new_file, new_folder
from nbflow.writing.plan import Choice, NewTensor, plan_as_stored
from nbflow.writing.safetensors_file import write_safetensors
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.quants.encoders import ENCODERS

_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class WrittenCheckpoint:
    """What was written, or with ``dry_run`` would be."""

    path: Path
    """The file or the folder."""
    format: str
    """Its file format: safetensors or gguf."""
    tensors: tuple[NewTensor, ...]
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
    to: str,
    *,
    rules: Iterable[str] = (),
    spec: str | os.PathLike[str] | None = None,
    encoder: str = "best",
    importance: str | os.PathLike[str] | Importance | None = None,
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
    to : str
        Format of the matrices of attention and feed-forward (`nbflow.weights_policy`): a name of
        `nbflow_kernels.FORMATS`.  GGUF takes GGML's types and f32, f16, bf16.
    rules : iterable of str
        ``PATTERN=FORMAT``: the first whose shell pattern matches a matrix's name decides on it.
        Names are those of the new file, or ours, ``layers.0.attn.q.weight``.
    spec : path, optional
        A spec file, as for `nbflow.load`.
    encoder : {"best", "plain", "gptq", "hqq"}
        See `nbflow_kernels.quants.encoders.quantize_with`; "gptq" needs second moments as
        `importance`, for every matrix that is put into blocks.
    importance : path or mapping, optional
        How much the squared error of each column counts: a file of llama.cpp's ``imatrix``,
        safetensors, or name -> array (K,) or (experts, K); see
        `nbflow.writing.importance.read_importance`.  Names are those of the new file, of the
        model's GGUF file, or ours.
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
    if encoder not in ENCODERS:
        raise unknown_name("encoder", encoder, ENCODERS)
    choice = Choice(to, rules)
    resolved = resolve(model, spec=spec)
    if isinstance(importance, str | os.PathLike):
        importance = read_importance(importance)
    if encoder == "gptq" and importance is None:
        raise UsageError(
            "encoder 'gptq' needs second moments of the inputs: nbflow imatrix MODEL --full -o "
            "FILE.safetensors, then --importance FILE.safetensors"
        )
    path = Path(out)
    with open_weights(resolved.path) as file:
        check(resolved.spec, file)
        if importance is not None:
            importance = with_our_names(importance, gguf_names(resolved, file))
        write = _write_gguf if path.suffix == ".gguf" else _write_safetensors
        return write(resolved, file, path, choice, encoder, importance, force, dry_run)


def _write_gguf(
    resolved: ResolvedModel,
    file: WeightFile,
    out: Path,
    choice: Choice,
    encoder: str,
    importance: Importance | None,
    force: bool,
    dry_run: bool,
) -> WrittenCheckpoint:
    """Write one GGUF file."""
    metadata, tensors, notes = plan_gguf(resolved, file, choice, str(out))
    tensors, more = weigh(tensors, importance)
    notes += [*more, *twice_note(tensors)]
    _check_output(resolved, file, out, force or dry_run)
    if not dry_run:
        with new_file(out) as stream:
            write_gguf(stream, metadata, tensors, encoder)
    return WrittenCheckpoint(out, "gguf", tuple(tensors), tuple(notes))


def _check_output(
    resolved: ResolvedModel,
    file: WeightFile,
    out: Path,
    force: bool,
    may_hold: frozenset[str] = frozenset(),
) -> None:
    """Raise if `out` must not be written; it must be none of the files that are read."""
    for original in {resolved.path, *file.files()}:
        check_output(out, original, force=force, may_hold=may_hold)


def _write_safetensors(
    resolved: ResolvedModel,
    file: WeightFile,
    out: Path,
    choice: Choice,
    encoder: str,
    importance: Importance | None,
    force: bool,
    dry_run: bool,
) -> WrittenCheckpoint:
    """Write one file, or a folder with everything that goes with it."""
    if file.format not in ("safetensors", "pickle"):
        raise UsageError(
            f"{out}: a {file.format} file holds the model's configuration itself, and safetensors "
            "has no place for it; write a .gguf file"
        )
    tensors, notes = weigh(plan_as_stored(resolved.spec, file, choice), importance)
    source = resolved.path if resolved.path.is_dir() else resolved.path.parent
    beside = [source / name for name in BESIDE if (source / name).is_file()]
    is_file = out.suffix == ".safetensors"
    notes += _notes(tensors, out, is_file)
    done = WrittenCheckpoint(out, "safetensors", tuple(tensors), tuple(notes))
    may_hold = frozenset() if is_file else frozenset({*BESIDE, _WEIGHTS})
    _check_output(resolved, file, out, force or dry_run, may_hold)
    if dry_run:
        return done
    if is_file:
        with new_file(out) as stream:
            write_safetensors(stream, tensors, encoder)
        return done
    with new_folder(out) as folder:
        for original in beside:
            shutil.copyfile(original, folder / original.name)
        with new_file(folder / _WEIGHTS) as stream:
            write_safetensors(stream, tensors, encoder)
    return done


def _notes(tensors: list[NewTensor], out: Path, is_file: bool) -> list[str]:
    """Return what the user should know about a safetensors file."""
    notes = twice_note(tensors)
    if is_file and not (out.parent / "config.json").is_file():
        notes.append("config.json must lie beside the file for it to be loaded")
    return notes


def twice_note(tensors: Iterable[NewTensor]) -> list[str]:
    """Return a note on tensors that lose precision a second time, if there are any."""
    n = sum(tensor.is_twice for tensor in tensors)
    return [f"{n} tensors were in blocks before and lose precision a second time"] if n else []
