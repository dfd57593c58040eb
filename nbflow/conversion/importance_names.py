"""GGUF names of our matrices, to exchange importance files with llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from nbflow.checkpoint import WeightFile, open_weights
from nbflow.checkpoint.readers import gguf
from nbflow.conversion.format_rules import FormatRules
from nbflow.conversion.gguf_names import ARCHITECTURES, plan_renamed, target_family
from nbflow.conversion.plan import plan_as_stored
from nbflow.quantization.importance import read_importance
from nbflow.spec import resolve
from nbflow.spec.resolve import ResolvedModel


def gguf_names(resolved: ResolvedModel, file: WeightFile) -> dict[str, tuple[str, ...]]:
    """Return names in a model's GGUF file -> our names of the parts of each tensor, in order.

    Empty for families that cannot be written as GGUF.
    """
    if file.format == gguf.FORMAT:
        tensors = plan_as_stored(resolved.spec, file, FormatRules("f32"))
    elif resolved.spec.family not in ARCHITECTURES:
        return {}
    else:
        arch, family = target_family(resolved.spec)
        tensors = plan_renamed(resolved.spec, file, family, arch, FormatRules("f32"))
    return {tensor.name: tensor.ours for tensor in tensors}


def gguf_names_of(model: str, spec: str | None = None) -> dict[str, tuple[str, ...]]:
    """Return `gguf_names` of a model given as for `nbflow.load`."""
    resolved = resolve(model, spec=spec)
    with open_weights(resolved.path) as file:
        return gguf_names(resolved, file)


def with_our_names(
    importance: Mapping[str, np.ndarray], names: Mapping[str, tuple[str, ...]]
) -> dict[str, np.ndarray]:
    """Return importance under GGUF's names and ours, separated by expert."""
    found = dict(importance)
    for name, ours in names.items():
        if name not in importance:
            continue
        array = np.asarray(importance[name])
        each = array.ndim == 2 and len(array) == len(ours) > 1
        for i, own in enumerate(ours):
            found.setdefault(own, array[i] if each else array)
    return found


def load_importance(
    importance: str | os.PathLike[str] | Mapping[str, np.ndarray] | None,
    resolved: ResolvedModel,
    file: WeightFile,
) -> dict[str, np.ndarray] | None:
    """Return importance, read from a file if need be, under its names and ours."""
    if importance is None:
        return None
    if isinstance(importance, str | os.PathLike):
        importance = read_importance(importance)
    return with_our_names(importance, gguf_names(resolved, file))
