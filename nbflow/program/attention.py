"""Ops of attention: multi-head, latent (MLA) with selected keys, and cross-attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nbflow.program.layer_ops import add, clip, linear, qkv_names, scale
from nbflow.program.records import Op, Operand
from nbflow.spec.layer_specs import BIAS_COLUMNS, CacheSide, LatentSpec
from nbflow.spec.model_spec import ModelSpec

INDEX_NORM_EPS = 1e-6
"""Epsilon of the norm of index keys in all published models."""


def attention(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return attention, including the residual sum."""
    if spec.latent is not None:
        return _latent_attention(spec, spec.latent, i, source)
    ops: list[Op] = []
    q, k, v = qkv_names(spec, i)
    a, ag = (f"{name}{'w' * spec.is_local(i)}" for name in ("a", "ag"))
    source_layer = spec.kv_source(i)
    has_kv = source_layer == i
    if spec.attn_input_scale != 1.0:
        ops, source = scale("as", source, i, spec.attn_input_scale), "as"
    copied = has_kv and spec.takes_values_from_keys(i)
    names = (q, *([k] * has_kv), *([v] * (has_kv and not copied)))
    ops += (linear(spec, i, f"attn.{name[0]}", source, name) for name in names)
    ops += clip(spec, i, names)
    if copied:
        ops += scale(v, k, i, 1.0)
    pre_rope = spec.caches_pre_rope(i)
    key_bias: tuple[Operand, ...] = ()
    if pre_rope and ops[-2].out == k and spec.qk_norm == "none":  # attention adds keys' bias
        ops[-2], key_bias = replace(ops[-2], bias=()), ops[-2].bias
    gate: list[Op] = []
    if spec.output_gate:
        ops.append(linear(spec, i, "attn.gate", source, ag))
        gate = [Op("gate", a, (ag, a), layer=i, attrs={"activation": "sigmoid"})]
    rotated = (q, k) if has_kv else (q,)
    ops += _norms_and_rope(spec, i, rotated, (q,) if pre_rope else rotated)
    if spec.dynamic_mask_keys:
        ops += _dynamic_mask(spec, i)
        q, k = rotated = ("qe", "ke")
    ops += _rotation(spec, i, "keys", *rotated)
    if has_kv:
        ops += _value_norm(spec, i, v)
        ops += [*_rotation(spec, i, "values", v), Op("append_kv", "kv", (k, v), layer=i)]
    table = (Operand("position_bias.weight"),) if spec.position == "relative" else ()
    sinks = (Operand(f"layers.{i}.attn.sinks.weight"),) if spec.has_sinks(i) else ()
    attrs = _mask(spec, i)
    if pre_rope:
        attrs |= {"key_rope": spec.rope_of(i), "key_bias": bool(key_bias)}
    if not has_kv:
        attrs |= {"kv_layer": source_layer}
    return [
        *ops,
        *_temperature(spec, i, q),
        Op("attention", a, (q,), table + key_bias, sinks, i, attrs),
        *_rotation(spec, i, "values", a),  # back: the transform is its own inverse
        *gate,
        linear(spec, i, "attn.o", a, "o"),
        add(spec, "x", "o", i, spec.attn_output_scale),
    ]


def _norms_and_rope(
    spec: ModelSpec, i: int, normed: tuple[str, ...], turned: tuple[str, ...]
) -> list[Op]:
    """Return the norms and the RoPE of queries and keys, in the model's order."""
    rope, attrs = spec.rope_of(i), dict[str, Any]()
    if spec.is_local(i):
        attrs = {"head": spec.heads_of(i).key_dim}
    norms = [_qk_norm(spec, i, name) for name in normed if spec.qk_norm != "none"]
    if not rope.dim:
        return [] if spec.qk_norm_layers == "rotated" else norms
    turn = Op("rope", turned[0], turned, layer=i, attrs={"rope": rope, **attrs})
    return [turn, *norms] if spec.qk_norm_after_rope else [*norms, turn]


def _rotation(spec: ModelSpec, i: int, side: CacheSide, *buffers: str) -> list[Op]:
    """Return the rotation of buffers for a side of the cache, if it holds rotated vectors."""
    if (side, spec.kv_source(i)) not in spec.rotated_cache:
        return []
    attrs = {"block": spec.rotation_block(side, i)}
    return [Op("hadamard", buffers[0], buffers, layer=i, attrs=attrs)]


def _dynamic_mask(spec: ModelSpec, i: int) -> list[Op]:
    """Return the biases of the keys as a column of keys and queries, whose product adds them."""
    columns = {"columns": BIAS_COLUMNS}
    numbers = (Operand(f"layers.{i}.attn.mask_rate.weight"),)
    return [
        linear(spec, i, "attn.mask", "v", "kb"),
        Op("extend_keys", "ke", ("k", "kb"), numbers, layer=i, attrs={**columns, "first": 0}),
        Op("extend_queries", "qe", ("q",), layer=i, attrs=columns | {"number": 1 / spec.sm_scale}),
    ]


def _value_norm(spec: ModelSpec, i: int, name: str) -> list[Op]:
    """Return the norm of each head's values, without weights, if the model has it."""
    if not spec.value_norm:
        return []
    head = spec.heads_of(i).value_dim
    attrs = {"norm": "rms", "eps": spec.norm_eps, "per_head": True, "head": head}
    return [Op("norm", name, (name,), layer=i, attrs=attrs)]


def _mask(spec: ModelSpec, i: int) -> dict[str, Any]:
    """Return the attributes of attention that narrow its causal mask."""
    found = {"window": spec.window_of(i), "chunk": spec.chunk_of(i)}
    return {name: size for name, size in found.items() if size is not None}


def _temperature(spec: ModelSpec, i: int, queries: str) -> list[Op]:
    """Return the factors of the queries, behind what may be fused with the product."""
    ops = scale(queries, queries, i, 1 / (i + 1)) if spec.sm_scale_by_layer else []
    found = spec.temperature_of(i)
    if found is not None:
        attrs = {"scale": found.scale, "floor": found.floor, "offset": found.offset}
        ops.append(Op("temperature", queries, (queries,), layer=i, attrs=attrs))
    return ops


def _qk_norm(spec: ModelSpec, i: int, name: str) -> Op:
    """Return the norm of queries (q) or keys (k)."""
    prefix = f"layers.{i}.attn.{name[0]}_norm"
    attrs: dict[str, Any] = {"norm": spec.qk_norm_kind, "eps": spec.norm_eps}
    if spec.norm_offset:
        attrs["offset"] = spec.norm_offset
    if spec.qk_norm != "all":
        attrs["per_head"] = True
    if spec.is_local(i):
        attrs["head"] = spec.heads_of(i).key_dim
    weights: tuple[Operand, ...] = (Operand(f"{prefix}.weight"),)
    if not spec.qk_norm_weight:
        weights = ()
    if spec.qk_norm == "each_head":
        n = spec.n_heads if name[0] == "q" else spec.heads_of(i).n_kv_heads
        weights = tuple(Operand(f"{prefix}.{j}.weight") for j in range(n))
        attrs["own_weights"] = True
    return Op("norm", name, (name,), weights, layer=i, attrs=attrs)


def _latent_attention(spec: ModelSpec, latent: LatentSpec, i: int, source: str) -> list[Op]:
    """Return multi-head latent attention (MLA) in its absorbed form.

    Queries are projected into the latent space, so that the latent vectors are keys and values of
    all heads and the only cached state: 576 instead of 5120 numbers per token in DeepSeek-V2-Lite.
    Dot products get longer (576 + 512 multiply-adds instead of 192 + 128).
    """
    prefix, D = f"layers.{i}.attn", spec.head_dim
    C, Dr, Dv = latent.kv_rank, spec.rope.dim, latent.value_dim

    def norm(name: str, buffer: str, **more: Any) -> Op:
        attrs = {"norm": "rms", "eps": latent.norm_eps, **more}
        return Op("norm", buffer, (buffer,), (Operand(f"{prefix}.{name}.weight"),), (), i, attrs)

    def each_head(name: str, rows: int, head: int, source: str, out: str) -> Op:
        cuts = [(h * rows, (h + 1) * rows) for h in range(spec.n_heads)]
        weights = tuple(Operand(f"{prefix}.{name}.weight", rows=cut) for cut in cuts)
        return Op("heads_linear", out, (source,), weights, layer=i, attrs={"head": head})

    rope = spec.rope_of(i)
    attrs = {"rope": rope, "first": C}
    turn = Op("rope", "ql", ("ql", "latent"), layer=i, attrs=attrs)
    if latent.q_rank:
        ops = [
            linear(spec, i, "attn.q_a", source, "qa"),
            linear(spec, i, "attn.kv_a", source, "latent"),
            norm("q_a_norm", "qa"),
            linear(spec, i, "attn.q", "qa", "q"),
        ]
    else:
        ops = [
            linear(spec, i, "attn.q", source, "q"),
            linear(spec, i, "attn.kv_a", source, "latent"),
        ]
    return [
        *ops,
        norm("kv_a_norm", "latent", columns=C),
        Op("copy_heads", "ql", ("q",), layer=i, attrs={"head": D, "columns": Dr}),
        *[turn] * (rope.dim > 0),
        Op("append_kv", "kv", ("latent",), layer=i),
        *_select_keys(spec, i, source),
        each_head("k_b", C, D, "q", "ql"),
        *_temperature(spec, i, "ql"),
        Op("attention", "al", ("ql",), layer=i, attrs=_mask(spec, i))
        if spec.indexer is None
        else Op("sparse_attention", "al", ("ql", "sel"), layer=i),
        each_head("v_b", Dv, C, "al", "a"),
        linear(spec, i, "attn.o", "a", "o"),
        add(spec, "x", "o", i),
    ]


def _select_keys(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return the selection of the keys of sparse attention; it writes sel."""
    indexer = spec.indexer
    if indexer is None or i not in indexer.layers:
        return []
    norm = f"layers.{i}.attn.index_norm"
    rope = replace(spec.rope_of(i), style=indexer.rope_style)
    return [
        linear(spec, i, "attn.index_k", source, "ik"),
        Op(
            "norm", "ik", ("ik",), (Operand(f"{norm}.weight"), Operand(f"{norm}.bias")), layer=i,
            attrs={"norm": "layer", "eps": INDEX_NORM_EPS},
        ),
        linear(spec, i, "attn.index_q", "qa", "iq"),
        Op("rope", "iq", ("iq", "ik"), layer=i, attrs={"rope": rope, "head": indexer.dim}),
        Op("append_index", "kv", ("ik",), layer=i),
        linear(spec, i, "attn.index_weights", source, "iw"),
        Op("select_keys", "sel", ("iq", "iw"), layer=i),
    ]  # fmt: skip


def cross_attention(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return cross-attention to the cached keys and values of the encoder's hidden states."""
    return [
        linear(spec, i, "cross.q", source, "q"),
        Op("cross_attention", "a", ("q",), layer=i),
        linear(spec, i, "cross.o", "a", "o"),
        add(spec, "x", "o", i),
    ]
