"""Checks of token ids that somebody gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError


def check_ids(spec: ModelSpec, ids: Sequence[int] | NDArray[Any], room: int) -> list[int]:
    """Return token ids that fit into the context, with `room` tokens besides them."""
    array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise UsageError(
            f"token ids must be a non-empty sequence of integers, got shape {array.shape} "
            f"of {array.dtype}"
        )
    if array.size + room > spec.max_context:
        more = f" (and {room} more to generate)" if room else ""
        raise UsageError(
            f"the prompt has {array.size} tokens{more}, but the context of {spec.name} "
            f"holds {spec.max_context}; shorten it"
        )
    if array.min() < 0 or array.max() >= spec.vocab_size:
        bad = int(array[(array < 0) | (array >= spec.vocab_size)][0])
        raise UsageError(
            f"token id {bad} is outside the vocabulary of {spec.name}, 0..{spec.vocab_size - 1}"
        )
    return [int(i) for i in array]


def check_types(
    spec: ModelSpec, types: Sequence[int] | NDArray[Any] | None, n: int
) -> list[int] | None:
    """Return the types of `n` tokens, if there are any and they fit the model."""
    if types is None:
        return None
    array = np.asarray(types)
    if array.shape != (n,) or array.dtype.kind not in "iu":
        raise UsageError(
            f"token_types must be {n} integers, one per token, got shape {array.shape} of "
            f"{array.dtype}"
        )
    most = spec.type_vocab_size
    if most == 0 or array.min() < 0 or array.max() >= most:
        raise UsageError(
            f"{spec.name} has {most} token types; token_types must lie below, got "
            f"{int(array.min())}..{int(array.max())}"
        )
    return [int(t) for t in array]
