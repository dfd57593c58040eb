"""Write `tests/golden/recurrent_ops.npz`: the recurrences of transformers on small inputs.

Needs torch and transformers.  Run: ``python tools/golden/recurrent_ops.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.activations import XIELUActivation
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.minimax.configuration_minimax import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxCache, MiniMaxLightningAttention
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

OUT = Path(__file__).parents[2] / "tests" / "golden" / "recurrent_ops.npz"
Arrays = dict[str, Any]


def normal(*shape: int) -> torch.Tensor:
    """Return random numbers."""
    return torch.randn(*shape)


def mamba2() -> Arrays:
    """One sequence of 37 tokens through the chunked form, chunks of 8."""
    T, H, P, G, N = 37, 4, 3, 2, 5
    x, dt, a = normal(1, T, H, P), normal(1, T, H), -torch.rand(H) * 3 - 0.2
    b, c, d, bias = normal(1, T, G, N), normal(1, T, G, N), normal(H), normal(H) - 1
    start = normal(1, H, P, N)
    y, end = mamba2_chunk_scan(
        x, dt, a, b, c, 8, D=d, dt_bias=bias, initial_states=start, dt_softplus=True,
        dt_limit=(0.05, 0.8), return_final_states=True,
    )  # fmt: skip
    named = {"x": x, "dt": dt, "b": b, "c": c, "start": start, "y": y, "end": end}
    return {**{k: v[0] for k, v in named.items()}, "a": a, "d": d, "dt_bias": bias}


def mamba1() -> Arrays:
    """One sequence of 9 tokens from an empty state."""
    T, C, N = 9, 5, 3
    x, dt, b, c = normal(1, C, T), normal(1, C, T), normal(1, N, T), normal(1, N, T)
    a, d, bias = -torch.rand(C, N) * 3 - 0.2, normal(C), normal(C) - 1
    y, end = mamba_selective_scan(
        x, dt, a, b, c, d, delta_bias=bias, delta_softplus=True, return_last_state=True
    )
    rows = {k: v[0].T for k, v in {"x": x, "dt": dt, "b": b, "c": c, "y": y}.items()}
    return {**rows, "a": a, "d": d, "dt_bias": bias, "end": end[0]}


def lightning() -> Arrays:
    """A layer of MiniMax: blocks of 4 tokens, then two single tokens from the cache."""
    config = MiniMaxConfig(
        hidden_size=8, num_attention_heads=2, num_key_value_heads=2, head_dim=4, block_size=4,
        num_hidden_layers=3, layer_types=["linear_attention"] * 3,
    )  # fmt: skip
    layer, cache, T = MiniMaxLightningAttention(config, layer_idx=1), MiniMaxCache(), 11
    made: dict[str, list[torch.Tensor]] = {"qkv": [], "y": []}
    layer.qkv_proj.register_forward_hook(lambda m, i, o: made["qkv"].append(layer.act_fn(o)))
    layer.norm.register_forward_hook(lambda m, i, o: made["y"].append(i[0]))
    hidden = normal(1, T, 8) * 3
    for part in (hidden[:, : T - 2], hidden[:, T - 2 : T - 1], hidden[:, T - 1 :]):
        layer(part, None, None, cache)
    qkv, y = (torch.cat(made[name], 1)[0].reshape(T, 2, -1) for name in ("qkv", "y"))
    q, k, v = qkv.split(4, dim=2)
    state = cache.get_linear_cache(1)[0]
    return {"q": q, "k": k, "v": v, "slopes": layer.slope_rate.ravel(), "y": y, "end": state}


def norms() -> Arrays:
    """Both orders of norm and gate; groups of 4 columns, and one group."""
    x, gate, weight = normal(3, 12), normal(3, 12), normal(12)
    first, last = NemotronHRMSNormGated(12, 4, 1e-5), Qwen3NextRMSNormGated(12, 1e-5)
    first.weight.data = last.weight.data = weight
    return {
        "x": x, "gate": gate, "weight": weight, "gate_first": first(x, gate),
        "norm_first": last(x, gate),
    }  # fmt: skip


def xielu() -> Arrays:
    """Parameters as they are in the formula, not as they are stored."""
    function = XIELUActivation(alpha_p_init=0.6, alpha_n_init=0.9, dtype=torch.float32)
    x = torch.cat([normal(20) * 3, torch.tensor([0.0, -1e-7])])
    return {"x": x, "y": function(x)}


def main() -> None:
    """Write the file."""
    torch.manual_seed(0)
    arrays = {}
    with torch.no_grad():
        for made in (mamba2, mamba1, lightning, norms, xielu):
            for name, value in made().items():
                arrays[f"{made.__name__}.{name}"] = value.detach().numpy()
    np.savez_compressed(OUT, **arrays)


main()
