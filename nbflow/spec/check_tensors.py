"""Compare a specification with the tensors of a checkpoint, before any is read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from nbflow.checkpoint import WeightFile
from nbflow.checkpoint.dtypes import ITEM_BITS
from nbflow.checkpoint.quantization_config import FLOAT8
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.tensor_names import DIVISORS
from nbflow_kernels.errors import UsageError

_LAYER = re.compile(r"\d+")
_MAX_LINES = 40
FLOAT_TYPES = ("f64", "f32", "f16", "bf16", *FLOAT8)
"""Types of weights, besides block formats and the int8 of llama2.c."""
WITH_BLOCKS = ("llama2c", "gguf", "ggml")
"""File formats with further types of weights."""


def check(spec: ModelSpec, weights: WeightFile) -> None:
    """Raise unless the checkpoint holds exactly the tensors of the specification.

    The error lists all tensors that are missing, of another shape, not of floats, or unused and not
    in ``spec.ignored_tensors``; those that differ in the layer only share a line.  With
    ``spec.tied_head`` an unused head is allowed.
    """
    found = {title: lines for title, lines in _misfits(spec, weights).items() if lines}
    if not found:
        return
    problems = [f"{title}:\n  " + "\n  ".join(_collapsed(found[title])) for title in found]
    if list(found) == ["unused"]:
        pattern = f"{found['unused'][0].split(' ')[0].rpartition('.')[0]}.*"
        problems.append(
            "tensors that the computation does not need go into a file for --spec with "
            f'extends = "{spec.family}", under [ignored], such as tensors = ["{pattern}"]'
        )
    raise UsageError(
        f"{weights.path}: {sum(map(len, found.values()))} tensors do not fit the specification of "
        f"{spec.name!r} (family {spec.family!r})\n" + "\n".join(problems)
    )


def _misfits(spec: ModelSpec, weights: WeightFile) -> dict[str, list[str]]:
    """Return a line for each tensor that does not fit, by what is wrong with it."""
    present, used = set(weights.names()), set()
    missing, shapes, types = [], [], []
    for part, ours in ((s, name) for s in spec.parts for name in s.tensor_shapes()):
        try:
            layout = part.tensor_layout(ours)
        except KeyError:
            missing.append(
                f"{ours} {part.shape_of(ours)} (family {part.family!r} does not name it: state the "
                "checkpoint's name under [tensors])"
            )
            continue
        name, shape = layout.name, layout.shape
        if name in used:  # another part of a fused tensor
            continue
        used.add(name)
        if name not in present:
            missing.append(f"{name} {shape}")
        elif not _fits(weights.shape(name), shape):
            shapes.append(f"{name} must have shape {shape}, got {weights.shape(name)}")
        elif not _can_be_weights(weights, name):
            types.append(f"{name} must be of {', '.join(FLOAT_TYPES)}, got {weights.dtype(name)}")
    allowed = [*DIVISORS] * (spec.rope.scaling is not None) + ["head.weight"] * spec.tied_head
    used.update(spec.tensors.get(name, "") for name in allowed)
    unused = [
        f"{name} {weights.shape(name)}"
        for name in weights.names()
        if name not in used
        and 0 not in weights.shape(name)  # parts that a model does not have may be stored empty
        and not any(fnmatchcase(name, p) for p in spec.ignored_tensors)
    ]
    return {"missing": missing, "wrong shape": shapes, "wrong type": types, "unused": unused}


def _can_be_weights(weights: WeightFile, name: str) -> bool:
    """Return whether a tensor has a type of weights."""
    dtype = weights.dtype(name)
    is_block_format = dtype not in ITEM_BITS
    return is_block_format or dtype in FLOAT_TYPES or weights.format in WITH_BLOCKS


def _fits(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a stored shape is ours.

    A vector may be stored in rows, e.g. one per group, and the matrices of all experts as one.
    """
    if len(shape) == 3 and len(stored) == 2:
        return stored == (shape[0] * shape[1], shape[2])
    return _squeezed(stored) == _squeezed(shape) or (
        len(shape) == 1 and math.prod(stored) == shape[0]
    )


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without dimensions of 1, which some writers leave out."""
    return tuple(size for size in shape if size != 1)


def _collapsed(lines: Iterable[str]) -> list[str]:
    """Join lines that differ only in their first number, which is the layer."""
    groups: dict[str, list[int]] = {}
    for line in lines:
        match = _LAYER.search(line.split(" ")[0])
        number = -1 if match is None else int(match.group())
        pattern = line if match is None else _LAYER.sub("{i}", line, count=1)
        groups.setdefault(pattern, []).append(number)
    joined = [pattern.replace("{i}", ranges(numbers), 1) for pattern, numbers in groups.items()]
    if len(joined) > _MAX_LINES:
        return [*joined[:_MAX_LINES], f"... and {len(joined) - _MAX_LINES} more kinds"]
    return joined


def ranges(numbers: list[int]) -> str:
    """Return numbers as ``3`` or ``{0..3,7}``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
    return text if text.isdigit() else f"{{{text}}}"
