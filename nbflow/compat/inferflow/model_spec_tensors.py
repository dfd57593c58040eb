"""Tensor names of Inferflow's model specifications, as ours.

A specification maps the names of a checkpoint to standard names (``dec.{i}.self_attn.wq.weight``);
those that it does not map have default names by the type of the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from nbflow.spec.tensor_names import TENSOR_NAMES

_STANDARD = re.compile(r"(?:(enc|dec)\.)?(?:(\{i\})\.)?([\w.{}]+)\.(weight|bias)")

_GLOBAL = {
    "token_embeddings": "embed",
    "shared": "embed",
    "pos_embeddings": "positions",
    "token_type_embeddings": "types",
    "input_norm": "embed_norm",
    "output_norm": "final_norm",
    "output": "head",
    "input_transform": "embed.in",
    "output_transform": "embed.out",
}
"""Standard name outside of layers -> ours, without ``.weight``."""
_OF_ENCODER = {"output_transform": "transform", "output_transform.post_norm": "transform_norm"}
"""Standard name in an encoder, whose head is that of a masked language model -> ours."""
_IN_LAYER = {
    "self_attn.pre_norm": "attn_norm",
    "self_attn.qkv": "attn.qkv",
    "self_attn.wq": "attn.q",
    "self_attn.wk": "attn.k",
    "self_attn.wv": "attn.v",
    "self_attn.wo": "attn.o",
    "cross_attn.pre_norm": "cross_norm",
    "cross_attn.wq": "cross.q",
    "cross_attn.wk": "cross.k",
    "cross_attn.wv": "cross.v",
    "cross_attn.wo": "cross.o",
    "feed_forward.pre_norm": "ffn_norm",
    "feed_forward.w2": "ffn.down",
    "feed_forward.w1n3": "ffn.gate_up",
    "moe.gate": "router",
    "moe.expert.{j}.w1": "moe.{j}.gate",
    "moe.expert.{j}.w2": "moe.{j}.down",
    "moe.expert.{j}.w3": "moe.{j}.up",
    "moe.shared_expert.w1": "shared.gate",
    "moe.shared_expert.w2": "shared.down",
    "moe.shared_expert.w3": "shared.up",
}
"""Standard name within a layer -> ours."""

_BOTH = (".weight", ".bias")
_HEADS = {f"{name}{kind}": f"output{kind}" for name in ("lm_head", "output") for kind in _BOTH}
_DECODER_LAYER = {
    "self_attn.qkv": "self_attn.qkv",
    "self_attn.q_proj": "self_attn.wq",
    "self_attn.k_proj": "self_attn.wk",
    "self_attn.v_proj": "self_attn.wv",
    "self_attn.o_proj": "self_attn.wo",
    "self_attn.out_proj": "self_attn.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "self_attn.pre_norm",
    "post_attention_layernorm": "feed_forward.pre_norm",
}
_META_LAYER = {
    "self_attn.W_pack": "self_attn.qkv",
    "attention.wq": "self_attn.wq",
    "attention.wk": "self_attn.wk",
    "attention.wv": "self_attn.wv",
    "attention.wo": "self_attn.wo",
    "feed_forward.w1": "feed_forward.w1",
    "feed_forward.w2": "feed_forward.w2",
    "feed_forward.w3": "feed_forward.w3",
    "attention_norm": "self_attn.pre_norm",
    "ffn_norm": "feed_forward.pre_norm",
}
_BLOOM_LAYER = {
    "self_attention.query_key_value": "self_attn.qkv",
    "self_attention.dense": "self_attn.wo",
    "mlp.dense_h_to_4h": "feed_forward.w1",
    "mlp.dense_4h_to_h": "feed_forward.w2",
    "input_layernorm": "self_attn.pre_norm",
    "post_attention_layernorm": "feed_forward.pre_norm",
}


def _layers(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {
        f"{prefix}.{{i}}.{theirs}{kind}": f"dec.{{i}}.{standard}{kind}"
        for theirs, standard in names.items()
        for kind in _BOTH
    }


DEFAULTS: dict[str, dict[str, str]] = {
    "decoder": {
        "embed_tokens.weight": "token_embeddings.weight",
        **_HEADS,
        **_layers("layers", _DECODER_LAYER),
    },
    "llama": {
        "embed_tokens.weight": "token_embeddings.weight",
        "tok_embeddings.weight": "token_embeddings.weight",
        **_HEADS,
        "norm.weight": "dec.output_norm.weight",
        **_layers("layers", _DECODER_LAYER | _META_LAYER),
    },
    "bloom": {
        "word_embeddings.weight": "token_embeddings.weight",
        "tok_embeddings.weight": "token_embeddings.weight",
        **{f"word_embeddings_layernorm{kind}": f"dec.input_norm{kind}" for kind in _BOTH},
        **{f"ln_f{kind}": f"dec.output_norm{kind}" for kind in _BOTH},
        **_HEADS,
        **_layers("h", _BLOOM_LAYER),
    },
    "encoder": {},
}
"""Type of a network -> name in the checkpoint, after the prefix -> standard name."""


@dataclass
class Names:
    """Names of a specification's tensors."""

    prefix: str
    tensors: dict[str, list[str]] = field(default_factory=dict)
    """Our name -> names in checkpoints, without the prefix."""
    w3: list[str] = field(default_factory=list)
    """Names of the matrix that only a gated feed-forward network has."""
    notes: list[str] = field(default_factory=list)

    def in_checkpoint(self, names: Iterable[str]) -> list[str]:
        """Return names with and without the prefix, of the first layer."""
        first = [name.replace("{i}", "0") for name in names]
        return [*(self.prefix + name for name in first), *(first if self.prefix else ())]

    def of(self, ours: str) -> list[str]:
        """Return the names that a checkpoint may have for a tensor, of the first layer."""
        names = self.tensors.get(ours)
        if names is None and ours.endswith(".bias"):  # called as its weight
            weights = self.tensors.get(ours.removesuffix(".bias") + ".weight", ())
            names = [n.removesuffix(".weight") + ".bias" for n in weights if n.endswith(".weight")]
        return self.in_checkpoint(names or ())


def tensor_names(
    kind: str,
    prefix: str,
    mapping: Mapping[str, str],
    renamed: Mapping[str, str],
    *,
    post_norms: bool,
    fused_w1: bool,
) -> Names:
    """Return our names of a network's tensors.

    Parameters
    ----------
    kind : str
        One of `DEFAULTS`.
    prefix : str
        ``tensor_name_prefix``.
    mapping : mapping
        ``tensor_name_mapping``: name in the checkpoint, prefix optional -> standard name.
    renamed : mapping
        ``tensor_name_pre_mapping``: name in the checkpoint -> name for `mapping`.
    post_norms : bool
        Post-norms are those of a post-norm network; else that of attention precedes the experts.
    fused_w1 : bool
        ``w1`` is gate and up, fused.
    """
    found = Names(prefix)
    bare = {name.removeprefix(prefix): standard for name, standard in mapping.items()}
    others = {n: s for n, s in DEFAULTS[kind].items() if n not in bare}
    for name, standard in [*bare.items(), *others.items()]:
        ours = list(our_names(standard, kind, post_norms, fused_w1))
        other = ".weight" if standard.endswith(".bias") else ".bias"
        wrong = not ours or name.endswith(other)
        if wrong and name in bare:
            found.notes.append(
                f"tensor_name_mapping: {name!r:.80} -> {standard!r:.80} has no effect: "
                + ("a bias and a weight" if ours else "not a standard name of such a network")
            )
        if wrong:
            continue
        if standard.endswith(".feed_forward.w3.weight"):
            found.w3.append(name)
        also = [old for old, new in renamed.items() if new in (name, prefix + name)]
        for one in ours:
            found.tensors.setdefault(one, []).extend([name, *also])
    for one in _BOTH:  # w1 is up in a network without a gate
        of_w3 = {n.removesuffix(".weight") + one for n in found.w3}
        found.tensors.get(f"layers.{{i}}.ffn.up{one}", []).sort(key=lambda n: n not in of_w3)
    _drop_derived_biases(found.tensors)
    return found


def our_names(standard: str, kind: str, post_norms: bool, fused_w1: bool) -> Iterator[str]:
    """Yield our names of a tensor by its standard name; none for an unknown one."""
    match = _STANDARD.fullmatch(standard)
    other = {"encoder": "dec", "pair": None}.get(kind, "enc")
    if match is None or (match[1] is not None and match[1] == other):
        return
    _, layer, name, suffix = match.groups()
    if layer is None:
        names = [(_OF_ENCODER if kind == "encoder" else {}).get(name) or _GLOBAL.get(name, "")]
    elif name == "feed_forward.w1":
        names = ["ffn.gate_up"] if fused_w1 else ["ffn.gate", "ffn.up"]
    elif name == "feed_forward.w3":
        names = ["ffn.up"]
    elif name == "self_attn.post_norm":
        names = ["attn_norm" if post_norms else "ffn_norm"]
    elif name == "feed_forward.post_norm":
        names = ["ffn_norm"]
    else:
        names = [_IN_LAYER.get(name, "")]
    for one in names:
        full = f"{'layers.{i}.' if layer else ''}{one}.{suffix}"
        if full in TENSOR_NAMES:
            yield full


def _drop_derived_biases(tensors: dict[str, list[str]]) -> None:
    """Leave out biases that are called as their weights."""
    for ours in [name for name in tensors if name.endswith(".bias")]:
        weights = tensors.get(ours.removesuffix(".bias") + ".weight", ())
        derived = [name.removesuffix(".weight") + ".bias" for name in weights]
        if set(tensors[ours]) <= set(derived):
            del tensors[ours]
