"""Gated delta rule in chunks for training, with a fast inverse of triangular blocks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F


class UnitLowerInverse(torch.autograd.Function):
    """Inverse of I + A for strictly lower triangular A (..., n, n), n = 8 * 2^k.

    `torch.linalg.solve_triangular` takes half of a step in a batch of small matrices.  The blocks
    of 8 are inverted by their Neumann product, then joined in pairs.
    """

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        n = a.shape[-1]
        identity = torch.eye(8)
        diagonal = torch.stack([a[..., i : i + 8, i : i + 8] for i in range(0, n, 8)], -3)
        square = diagonal @ diagonal
        x = (identity - diagonal) @ (identity + square) @ (identity + square @ square)
        while (size := x.shape[-1]) < n:
            below = [a[..., i + size : i + 2 * size, i : i + size] for i in range(0, n, 2 * size)]
            first, second = x[..., 0::2, :, :], x[..., 1::2, :, :]
            corner = -(second @ torch.stack(below, -3) @ first)
            top = torch.cat([first, torch.zeros_like(first)], -1)
            x = torch.cat([top, torch.cat([corner, second], -1)], -2)
        x = x.squeeze(-3)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return -(x.mT @ gradient @ x.mT)


@torch.autocast("cpu", enabled=False)
def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Gated delta rule from an empty state in chunks of 32 (Yang et al., 2024, section 3.3).

    query, key (B, T, G, D), value (B, T, H, V), log decay and beta (B, T, H), T a multiple of 32.
    """
    B, T, H, V = value.shape
    C = 32
    query, key = (F.normalize(x.float(), dim=-1) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    query, key = (x.repeat_interleave(H // x.shape[2], 2) for x in (query, key))
    q, k, v = (
        x.float().view(B, T // C, C, H, -1).transpose(2, 3) for x in (query, key, value)
    )  # (B, N, H, C, D)
    g, beta = (x.float().view(B, T // C, C, H).transpose(2, 3) for x in (g, beta))
    total = g.cumsum(-1)
    causal = torch.ones(C, C, dtype=torch.bool).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -math.inf).exp()
    k_beta = k * beta[..., None]
    inverse = UnitLowerInverse.apply((k_beta @ k.mT * decay).tril(-1))
    new = inverse @ (v * beta[..., None])
    read = inverse @ (k_beta * total.exp()[..., None])
    scores = q @ k.mT * decay
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]
    state = torch.zeros(B, H, k.shape[-1], V)
    outputs = []
    for n in range(T // C):
        delta = new[:, n] - read[:, n] @ state
        outputs.append(q[:, n] @ state + scores[:, n] @ delta)
        state = state * kept[:, n] + k[:, n].mT @ delta
    return torch.stack(outputs, 1).transpose(2, 3).reshape(B, T, H, V), None
