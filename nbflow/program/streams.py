"""Op records around the sublayers of a layer: residual streams, per-layer embeddings, LAuReL.

With several streams (AltUp) buffer xs holds all of them, columns of one after another.  A layer
predicts all streams (ps), computes the active one in x as any other model does, and corrects the
predictions by what x gained.  Per-layer embeddings are columns of buffer pe, one vector per layer,
made once from the token ids and the token embedding.

References
----------
.. [1] C. Baykal et al., "Alternating Updates for Efficient Transformers", arXiv:2301.13310.
.. [2] G. Menghani, R. Kumar, S. Kumar, "LAuReL: Learned Augmented Residual Layer",
   arXiv:2411.07501, section 2 (LAuReL-LR).
"""

from __future__ import annotations

import math
from typing import Literal

from nbflow.program.layer_ops import add, columns_of, linear, norm, scale
from nbflow.program.records import Buffer, Op, Operand
from nbflow.spec.model_spec import ModelSpec

MIN_MEAN_SQUARE = 1e-5
"""Least mean square of a row whose magnitude is changed to that of another, in Gemma 3n."""


def stream_names(spec: ModelSpec, base: str) -> tuple[str, ...]:
    """Return the buffers of the streams, columns of `base`."""
    return tuple(f"{base}{j}" for j in range(spec.streams))


def layer_embed_name(layer: int) -> str:
    """Return the buffer of a layer's embedding, columns of buffer pe."""
    return f"pe{layer}"


def buffers(spec: ModelSpec) -> dict[str, Buffer]:
    """Return the buffers of this module, by name."""
    E, S, P = spec.hidden_size, spec.streams, spec.layer_embed_size
    found: dict[str, Buffer] = {}
    if S > 1:
        for base in ("xs", "ps", "ys"):
            rows: Literal["tokens", "states"] = "states" if base == "ys" else "tokens"
            found[base] = Buffer(S * E, rows)
            for j, name in enumerate(stream_names(spec, base)):
                found[name] = Buffer(E, rows, base, j * E)
        found |= {"tr": Buffer(S), "tp": Buffer(S * S), "tc": Buffer(S), "yu": Buffer(E, "states")}
    if spec.laurel_rank:
        found |= {"ur": Buffer(spec.laurel_rank), "uo": Buffer(E)}
    if P:
        found |= {"pe": Buffer(spec.n_layers * P), "pp": Buffer(spec.n_layers * P)}
        found |= {"pg": Buffer(P), "pv": Buffer(E), "po": Buffer(E)}
        for i in range(spec.n_layers):
            found[layer_embed_name(i)] = Buffer(P, base="pe", offset=i * P)
    return found


# ---- before and behind the layers -------------------------------------------------------------


def first_streams(spec: ModelSpec) -> list[Op]:
    """Return the ops from x, the token embedding, to all streams."""
    if spec.streams == 1:
        return []
    names = stream_names(spec, "xs")
    active, others = names[0], names[1:]  # the embedding is the first stream
    ops = [_copy(active, "x", None)]
    for j, name in enumerate(others):
        ops += [
            Op("linear", name, ("x",), (Operand(f"streams.in.{j}.weight"),)),
            _like(name, "x"),
        ]
    return ops


def join_streams(spec: ModelSpec) -> list[Op]:
    """Return the ops from all streams to y: their mean, each as large as the first."""
    if spec.streams == 1:
        return [Op("take_rows", "y", ("x",))]
    first, *others = stream_names(spec, "ys")
    ops = [Op("take_rows", "ys", ("xs",)), _copy("y", first, None)]
    for j, name in enumerate(others):
        weight = (Operand(f"streams.out.{j}.weight"),)
        ops += [Op("linear", "yu", (name,), weight), _like("yu", first), add(spec, "y", "yu", None)]
    return [*ops, Op("scale", "y", ("y",), attrs={"scale": 1.0 / spec.streams})]


def _like(out: str, other: str) -> Op:
    """Return ``out`` with rows of the magnitude of another buffer's."""
    return Op("match_rms", out, (out, other), attrs={"least": MIN_MEAN_SQUARE})


def _copy(out: str, source: str, layer: int | None) -> Op:
    return Op("scale", out, (source,), layer=layer, attrs={"scale": 1.0})


def layer_embeddings(spec: ModelSpec) -> list[Op]:
    """Return the ops that write the embeddings of all layers from token ids and x."""
    P = spec.layer_embed_size
    if not P:
        return []
    n_rows = spec.layer_embed_vocab_size
    attrs = {"scale": math.sqrt(P)} | ({"rows": n_rows} if 0 < n_rows < spec.vocab_size else {})
    normed = norm(spec, "layer_embed_norm", "pp", "pp", None)
    per_vector = Op(
        "norm", "pp", ("pp",), normed.weights, attrs={**normed.attrs, "per_head": True, "head": P}
    )
    return [
        Op("embedding", "pe", weights=(Operand("layer_embed.weight"),), attrs=attrs),
        Op("linear", "pp", ("x",), (Operand("layer_embed.in.weight"),)),
        Op("scale", "pp", ("pp",), attrs={"scale": spec.hidden_size**-0.5}),
        per_vector,
        Op("add", "pe", ("pp",)),
        Op("scale", "pe", ("pe",), attrs={"scale": math.sqrt(0.5)}),
    ]


# ---- in a layer -------------------------------------------------------------------------------


def _router(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return the weights of a token (tr), by which streams are predicted and corrected."""
    attrs = {"norm": "rms", "eps": spec.norm_eps}
    weight = (Operand(f"layers.{i}.streams.router_norm.weight"),)
    return [
        Op("norm", "h", (source,), weight, layer=i, attrs=attrs),
        linear(spec, i, "streams.router", "h", "tr"),
        *scale("tr", "tr", i, 1.0 / spec.hidden_size),
        Op("soft_cap", "tr", ("tr",), layer=i, attrs={"cap": 1.0}),  # tanh
    ]


def predict(spec: ModelSpec, i: int) -> list[Op]:
    """Return the prediction of all streams; x becomes the active one."""
    if spec.streams == 1:
        return []
    active = spec.active_stream
    return [
        *_router(spec, i, f"xs{active}"),
        linear(spec, i, "streams.predict", "tr", "tp"),
        _copy("ps", "xs", i),
        Op("mix", "ps", ("xs", "tp"), layer=i, attrs={"width": spec.hidden_size}),
        _copy("x", f"ps{active}", i),
    ]


def correct(spec: ModelSpec, i: int) -> list[Op]:
    """Return the correction of the predicted streams by what the active one gained."""
    if spec.streams == 1:
        return []
    gained = Op("add", "x", (f"ps{spec.active_stream}",), layer=i, attrs={"scale": -1.0})
    return [
        *_router(spec, i, "x"),
        linear(spec, i, "streams.correct", "tr", "tc"),
        gained,
        _copy("xs", "ps", i),
        Op("mix", "xs", ("x", "tc"), layer=i, attrs={"width": spec.hidden_size, "offset": 1.0}),
    ]


def laurel(spec: ModelSpec, i: int, source: str) -> list[Op]:
    """Return the learned residual of the input of attention, added to x before attention is."""
    if not spec.laurel_rank:
        return []
    return [
        linear(spec, i, "laurel.down", source, "ur"),
        linear(spec, i, "laurel.up", "ur", "uo"),
        norm(spec, f"layers.{i}.laurel_norm", "uo", "uo", i),
        Op("add", "x", ("uo",), layer=i),
        Op("add", "x", (source,), layer=i),
    ]


def after_laurel(spec: ModelSpec, i: int) -> list[Op]:
    """Return the division of the sum of residual, attention and learned residual."""
    return scale("x", "x", i, math.sqrt(0.5)) if spec.laurel_rank else []


def layer_embed(spec: ModelSpec, i: int) -> list[Op]:
    """Return the gate that the layer's embedding multiplies, and its residual sums.

    They go to the streams behind the first, or to x.
    """
    if not spec.layer_embed_size:
        return []
    several = spec.streams > 1
    source, ops = f"xs{spec.active_stream}" if several else "x", list[Op]()
    if several and spec.stream_output_scale:
        name = f"layers.{i}.streams.output_scale"
        ops, source = [columns_of("pv", source, name, i)], "pv"
    activation = {"activation": spec.activation_name}
    return [
        *ops,
        linear(spec, i, "layer_embed.gate", source, "pg"),
        Op("activation", "pg", ("pg",), layer=i, attrs=activation),
        Op("gate", "pg", ("pg", layer_embed_name(i)), layer=i, attrs={"activation": "identity"}),
        linear(spec, i, "layer_embed.out", "pg", "po"),
        norm(spec, f"layers.{i}.layer_embed_norm", "po", "po", i),
        *(
            Op("add", name, ("po",), layer=i)
            for name in (stream_names(spec, "xs")[1:] if several else ("x",))
        ),
    ]


def layer_end(spec: ModelSpec, i: int) -> list[Op]:
    """Return the factor of the residual stream behind a layer."""
    return [columns_of("x", "x", f"layers.{i}.layer_scale", i)] if spec.layer_scale else []
