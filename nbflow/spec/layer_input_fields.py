"""Fields for what flows between layers: shared caches, per-layer embeddings, several streams."""

from __future__ import annotations

import math

from nbflow.spec.field import MAX_LAYERS, MAX_WIDTH, Field
from nbflow_kernels.product_keys import MAX_CHOSEN, MAX_KEYS

MAX_RETRIEVED = MAX_KEYS**2
"""Bound on experts of one row."""
MAX_STREAMS = 64
"""Bound on residual streams: published models have 4."""

LAYER_INPUT_FIELDS = {
    "kv_shared_layers": Field(
        int,
        "number of last layers without keys and values of their own: they attend to those of the "
        "last layer before them with the same mask",
        0,
        most=MAX_LAYERS,
    ),
    "values_from_keys": Field(
        ("none", "full", "all"),
        "layers whose values are the keys before their norm and rotation: none, those without the "
        "window, or all",
        "none",
    ),
    "value_norm": Field(bool, "norm of each head's values, without weights", False),
    "ffn_sizes": Field(
        [int],
        "width of the feed-forward network of each layer, or one for all; intermediate_size if "
        "absent",
        (),
        least=1,
        most=MAX_WIDTH,
    ),
    "kv_shared_ffn_factor": Field(
        int, "factor of intermediate_size in the layers of kv_shared_layers", 1, least=1, most=64
    ),
    "activation_sparsity": Field(
        [float],
        "share of each layer's ffn.gate columns that become 0 before the activation, below the "
        "quantile of a normal distribution with their mean and deviation; 0 for none, and in "
        "layers behind the list; one number is for all",
        (),
        least=0.0,
        most=0.9999,
    ),
    "activation_cuts": Field(
        [float],
        "the same in deviations above the mean below which columns become 0, in layers where "
        "activation_sparsity says nothing; -inf for none",
        (),
        least=-math.inf,
    ),
    "layer_embed_size": Field(
        int,
        "width of the per-layer embeddings: a second table and a projection of the token embedding "
        "give each layer a vector, which multiplies a gate behind it; 0 for none",
        0,
        most=MAX_WIDTH,
    ),
    "layer_embed_vocab_size": Field(
        int, "rows of that table; further ids take row 0; vocab_size if 0", 0
    ),
    "layer_scale": Field(bool, "each layer ends with a factor of the residual stream", False),
    "residual_weights": Field(
        bool, "the residual stream has a factor per column where a sublayer is added to it", False
    ),
    "retrieved_experts": Field(
        int,
        "experts of one row each, added to the dense feed-forward network: act(x . down) * up; "
        "keys are pairs of halves, of which retrieval.router gives the scores; 0 for none",
        0,
        most=MAX_RETRIEVED,
    ),
    "retrieved_per_token": Field(
        int, "these experts per token, weighted by the softmax of their scores", 0, most=MAX_CHOSEN
    ),
    "dynamic_mask_keys": Field(
        int,
        "keys have a bias that their values give (Doge's dynamic mask), which keeps this many of "
        "them per head; contexts end there, so that all are kept; 0 for none",
        0,
    ),
    "sparse_from": Field(
        int,
        "length from which blocks of keys are selected (InfLLM v2), which is not done: contexts "
        "end before it",
        None,
        least=-1,
    ),
    "streams": Field(
        int,
        "residual streams (AltUp): layers compute one and predict the others; 1 for a plain one",
        1,
        least=1,
        most=MAX_STREAMS,
    ),
    "active_stream": Field(int, "the stream that layers compute, from 0", 0, most=MAX_STREAMS - 1),
    "stream_output_scale": Field(
        bool, "factor per column of the active stream before the gate of layer_embed_size", False
    ),
    "laurel_rank": Field(
        int,
        "rank of a learned residual beside attention (LAuReL); the sum with it is divided by "
        "sqrt(2); 0 for none",
        0,
        most=MAX_WIDTH,
    ),
}
"""Fields of `nbflow.spec.architecture.Architecture`."""
