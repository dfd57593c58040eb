"""What is written: every tensor of the new file, its format and where its rows come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np

import nbflow_kernels as nk
from nbflow.checkpoint import WeightFile
from nbflow.checkpoint.dtypes import ITEM_BYTES
from nbflow.checkpoint.weight_file import tensor_bytes
from nbflow.conversion.encode_rows import Rows, Statistics, StoredRows, write_rows
from nbflow.quantization.encoding import QuantizerOptions
from nbflow.quantization.policy import Weights, weight_formats
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the file that is written."""

    name: str
    """Its name there."""
    shape: tuple[int, ...]
    """Its shape, rows first."""
    stored: str
    """How the checkpoint stores it."""
    format: str
    """How it is written: a plain type or a block format."""
    parts: tuple[Rows, ...]
    """Where its rows come from, in order."""
    ours: tuple[str, ...] = ()
    """What we call what it holds."""
    importance: np.ndarray | None = field(default=None, compare=False)
    """How much each column counts, float32 (1 or parts, columns), or second moments of the columns,
    (1 or parts, columns, columns)."""

    @property
    def n_bytes(self) -> int:
        """Bytes it takes in the file."""
        return tensor_bytes(self.format, self.shape, f"tensor {self.name}")

    @property
    def is_twice(self) -> bool:
        """Whether it was in blocks and gets into others, which loses twice."""
        return self.stored not in ITEM_BYTES and self.format != self.stored

    def weighed(self, importance: np.ndarray) -> TensorPlan:
        """Return it with importances of its columns."""
        return dataclasses.replace(self, importance=importance)

    def pieces(self, encoding: QuantizerOptions) -> Iterator[bytes | memoryview]:
        """Yield its bytes."""
        known: list[Statistics] = [] if self.importance is None else list(self.importance)
        for i, rows in enumerate(self.parts):
            own = known[i if len(known) > 1 else 0] if known else None
            yield from write_rows(rows, self.format, self.name, encoding, own)


class FormatRules:
    """Which format each matrix gets: the first rule that matches, else the policy.

    Parameters
    ----------
    to : str, path or WeightFormats
        The format of the matrices that `nbflow.quantization.policy` names, or a policy file.
    rules : sequence of str
        ``PATTERN=FORMAT`` each; a shell pattern for names of the new file or for our names.
    """

    def __init__(self, to: Weights, rules: Iterable[str] = ()) -> None:
        formats = weight_formats(to)
        assert formats is not None
        self.formats = formats
        self.to = formats.patterns[0][1] if formats.facts is None else ""
        self.rules = [_parse_rule(rule) for rule in rules]
        self._unused = {text: None for text, _, _ in self.rules}

    def of(self, name: str, ours: Sequence[tuple[str, tuple[int, ...]]]) -> str | None:
        """Return the format of a tensor, or None to keep what it is.

        `ours` are our names and shapes of what it holds; vectors are never converted.
        """
        if not ours or any(len(s) < 2 or own.endswith(".bias") for own, s in ours):
            return None
        for text, pattern, format in self.rules:
            if any(fnmatchcase(n, pattern) for n in (name, *(own for own, _ in ours))):
                self._unused.pop(text, None)
                return format
        chosen = {self.formats.of(own, shape) for own, shape in ours}
        if self.to:  # one for all; a tensor that also holds what is kept is kept
            return None if None in chosen else self.to
        if len(chosen) > 1:
            found = ", ".join(f"{own} {self.formats.of(own, shape)}" for own, shape in ours)
            raise UsageError(
                f"tensor {name} holds matrices that the policy gives different formats ({found}); "
                "give them one"
            )
        return chosen.pop()

    def check_rules(self) -> None:
        """Raise if a rule was never the first to match."""
        if self._unused:
            raise UsageError(
                f"rule {next(iter(self._unused))!r} is for no matrix that an earlier rule has not "
                "taken; rules match names like layers.0.attn.q.weight, or those that --dry-run "
                "prints, and vectors stay as they are"
            )


def _parse_rule(text: str) -> tuple[str, str, str]:
    """Return a rule, its pattern and its format."""
    pattern, equals, format = text.rpartition("=")
    if not equals or not pattern:
        raise UsageError(f"a rule must be PATTERN=FORMAT, e.g. '*down*=q6_k', got {text!r}")
    return text, pattern, nk.FORMATS[format].name


def all_tensors(spec: ModelSpec) -> list[tuple[ModelSpec, str]]:
    """Return our names of all tensors, with the specification they belong to."""
    parts = [spec] if spec.encoder is None else [spec, spec.encoder]
    return [(part, name) for part in parts for name in part.tensor_shapes()]


def plan_as_stored(
    spec: ModelSpec, file: WeightFile, choice: FormatRules, *, blocks: bool = True
) -> list[TensorPlan]:
    """Return the tensors under the checkpoint's own names, in its order.

    Without `blocks` it is not checked whether they can be written so, nor that every rule is used.
    """
    held: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    turned = set()
    for part, ours in all_tensors(spec):
        place = part.tensor_layout(ours)
        held.setdefault(place.name, []).append((ours, part.shape_of(ours)))
        if place.transposed:
            turned.add(place.name)
    tensors = []
    for name in file.names():
        chosen = choice.of(name, held.get(name, []))
        if blocks and chosen is not None and name in turned and nk.FORMATS[chosen].block_size > 1:
            raise UsageError(
                f"tensor {name} is stored as (in, out), but blocks lie along the inputs; "
                "checkpoints of this family cannot be written in blocks, load them with weights="
            )
        dtype = file.dtype(name)
        rows = StoredRows(file, name)
        own_names = tuple(own for own, _ in held.get(name, []))
        format = chosen or dtype
        tensors.append(TensorPlan(name, file.shape(name), dtype, format, (rows,), own_names))
    if blocks:
        choice.check_rules()
        check_blocks(tensors)
    return tensors


def check_blocks(tensors: Sequence[TensorPlan]) -> None:
    """Raise unless the rows of every tensor are whole blocks of its format."""
    sizes: Mapping[str, int] = {name: nk.FORMATS[name].block_size for name in nk.FORMATS}
    wrong = [t for t in tensors if t.shape and t.shape[-1] % sizes.get(t.format, 1)]
    if wrong:
        first = wrong[0]
        raise UsageError(
            f"tensor {first.name} has rows of {first.shape[-1]} weights, no multiple of the "
            f"{first.format} block of {sizes[first.format]}, and so have {len(wrong) - 1} others; "
            "choose another format, or give them one with a rule, e.g. "
            f"'{first.name}=f16'"
        )
