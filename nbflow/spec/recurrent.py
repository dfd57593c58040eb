"""Recurrent mixers of a `ModelSpec`, from the values of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbflow.spec.layer_specs import DeltaSpec, SelectiveSpec, StateSpaceSpec


def delta(values: Mapping[str, Any]) -> DeltaSpec | None:
    """Return the gated delta rule, or None for a model without it."""
    if not values["linear_value_heads"]:
        return None
    parts = (
        "key_heads", "value_heads", "key_dim", "value_dim", "beta_scale", "decay", "rank", "gate",
        "key_copies",
    )  # fmt: skip
    eps = values["linear_norm_eps"]
    return DeltaSpec(
        **{name: values[f"linear_{name}"] for name in parts},
        norm_eps=values["norm_eps"] if eps is None else eps,
    )


def state_space(values: Mapping[str, Any]) -> StateSpaceSpec | None:
    """Return Mamba-2, or None for a model without it."""
    if not values["ssm_heads"]:
        return None
    parts = (
        "heads", "head_dim", "groups", "state_dim", "norm_groups", "dt_min", "dt_max", "norm",
        "input_scale", "scales", "output_scale",
    )  # fmt: skip
    return StateSpaceSpec(**{name: values[f"ssm_{name}"] for name in parts})


def selective(values: Mapping[str, Any]) -> SelectiveSpec | None:
    """Return Mamba-1, or None for a model without it."""
    if not values["mamba1_width"]:
        return None
    parts = ("width", "state_dim", "dt_rank", "norm")
    eps = values["mamba1_norm_eps"]
    return SelectiveSpec(
        **{name: values[f"mamba1_{name}"] for name in parts},
        norm_eps=values["norm_eps"] if eps is None else eps,
    )
