"""Keys cached before the rotary embedding, without the bias of their projection.

RoPE turns a channel that is large for every token into two that swing with the position, and a bias
of the keys, which no token needs to store, sets the range of their blocks.  Caches of keys before
both (KVQuant, arXiv:2401.18079, section 3.2) hold plain channels; attention adds the bias and
rotates each key by its position as it reads it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError, unknown_name

KeyForm = Literal["post_rope", "pre_rope"]
KEY_FORMS = ("post_rope", "pre_rope")


def with_key_form(spec: ModelSpec, form: str) -> ModelSpec:
    """Return the specification of a model whose caches hold keys before or after RoPE.

    Parameters
    ----------
    spec : ModelSpec
        The model, after `nbflow.kv_cache.rotation.with_rotation`.
    form : {"post_rope", "pre_rope"}
        "pre_rope" holds keys before RoPE, and without the bias of their projection where no norm
        follows it.

    Raises
    ------
    UsageError
        If the form is unknown, or the model's keys cannot be cached before RoPE.
    """
    if form not in KEY_FORMS:
        raise unknown_name("kv_keys", form, KEY_FORMS)
    if form == "post_rope":
        return spec
    layers = range(spec.n_layers)
    wrong = ""
    if spec.latent is not None:
        wrong = "caches latent vectors, whose rotated columns are apart"
    elif spec.attention is not None:
        wrong = f"has the attention variant {spec.attention}, which sees rotated keys"
    elif any(("keys", i) in spec.rotated_cache for i in layers):
        wrong = (
            "has keys that kv_rotation='hadamard' rotates after RoPE; rotate values alone, "
            "e.g. kv='f16/q4_0', or"
        )
    elif not any(spec.rope_of(i).dim for i in layers):
        wrong = "has no rotary embedding"
    elif spec.qk_norm_after_rope:
        wrong = "normalizes keys after RoPE"
    elif any(spec.kv_source(i) != i or spec.takes_values_from_keys(i) for i in layers):
        wrong = "has layers that share keys with others, or values that are keys"
    elif len(spec.rope_lengths) > 1:
        wrong = "rotates the same key differently in long sequences (LongRoPE)"
    if wrong:
        raise UsageError(f"kv_keys='pre_rope': {spec.name} {wrong}; use kv_keys='post_rope'")
    return replace(spec, pre_rope_keys=True)
