"""Cut one rank's part out of a program and insert what it must communicate.

Within a stage, q, k, v, gate, up and the head are cut by rows (each rank computes some columns of
the result), o and down by columns (each rank computes a partial sum, summed over the stage by an
all-reduce: two per layer).  The token embedding is cut by rows, too: a rank gives zeros for tokens
that others hold, and an all-reduce adds them up, which rounds nothing.  Latent attention has its
matrices cut by heads, while the latent vectors, and with them the cache, are the same on every rank
of the stage.  Experts are dealt out
whole: each rank computes the contribution of its own, and the same all-reduce adds them.  Between
stages the hidden states are sent.
"""

from __future__ import annotations

import dataclasses

from nbflow.distributed.plan import RankPlan
from nbflow.program.records import Buffer, Op, Operand, Program

PARTIAL = ("attn.o", "cross.o", "ffn.down", "shared.down")
"""Matrices that are cut by columns, so that the ranks' results must be summed."""


def partition(program: Program, plan: RankPlan) -> Program:
    """Return the program of one rank."""
    spec = program.spec
    alone = len(plan.group) == 1
    cuts = _cuts(program, plan)
    ops: list[Op] = []
    moves_x = "x" in program.buffers
    if plan.receives_from is not None and moves_x:
        ops.append(Op("recv", "x", attrs={"peer": plan.receives_from}))
    behind = False
    unsummed = False
    for op in program.ops:
        if op.layer is None:
            ops += _outside_layers(op, plan, behind)
            continue
        behind = True
        if not plan.layers[0] <= op.layer < plan.layers[1]:
            continue
        if unsummed and "o" in op.inputs:
            attrs = {"ranks": plan.group, "exchange": plan.exchange}
            ops.append(Op("all_reduce", "o", layer=op.layer, attrs=attrs))
            unsummed = False
        if not alone and op.kind == "norm" and op.out in "qk" and spec.qk_norm == "all":
            ops += _shared_norm(program, op, plan, cuts)
            continue
        ops.append(op if alone else _inside_layer(op, plan, cuts))
        unsummed = not alone and (unsummed or (op.out == "o" and op.kind != "norm"))
    if plan.sends_to and moves_x:
        ops.append(Op("send", "x", ("x",), attrs={"peers": plan.sends_to}))
    heads = plan.heads[1] - plan.heads[0], plan.kv_heads[1] - plan.kv_heads[0]
    return Program(
        spec,
        tuple(ops),
        _buffers(program, plan, ops),
        *heads,
        tuple(range(*plan.layers)),
        plan.heads[0],
    )


def _buffers(program: Program, plan: RankPlan, ops: list[Op]) -> dict[str, Buffer]:
    """Return the buffers of a rank's ops, as wide as its part."""
    cuts, spec = _cuts(program, plan), program.spec
    widths = {name: b - a for name, (a, b) in cuts.items()}
    mine = {
        "q": widths["attn.q"],
        "a": widths["attn.o"],
        "ql": (plan.heads[1] - plan.heads[0]) * spec.cached_dim,
        "al": widths["attn.latent"],
        "k": widths["attn.k"],
        "v": widths["attn.v"],
        **dict.fromkeys(("gate", "up", "f"), widths["ffn.up"]),
        **dict.fromkeys(("sgate", "sup", "sf"), widths["shared.up"]),
        "logits_part": plan.vocab[1] - plan.vocab[0],
    }
    used = {name for op in ops for name in (op.out, *op.inputs)}
    whole = {**program.buffers, "logits_part": Buffer(0, "logits"), "squares": Buffer(2)}
    return {
        name: dataclasses.replace(buffer, width=mine.get(name, buffer.width))
        for name, buffer in whole.items()
        if name in used
    }


def _cuts(program: Program, plan: RankPlan) -> dict[str, tuple[int, int]]:
    """Return, for each kind of matrix, the rows (or columns) this rank holds."""
    spec = program.spec
    D, Dv = spec.head_dim, spec.value_dim
    C = 0 if spec.latent is None else spec.latent.kv_rank
    q = (plan.heads[0] * D, plan.heads[1] * D)
    kv = (plan.kv_heads[0] * D, plan.kv_heads[1] * D)
    return {
        **dict.fromkeys(("attn.q", "cross.q"), q),
        **dict.fromkeys(("attn.o", "cross.o"), (plan.heads[0] * Dv, plan.heads[1] * Dv)),
        "attn.latent": (plan.heads[0] * C, plan.heads[1] * C),
        **dict.fromkeys(("attn.k", "attn.v", "cross.k", "cross.v"), kv),
        **dict.fromkeys(("ffn.gate", "ffn.up", "ffn.down"), plan.ffn),
        **dict.fromkeys(("shared.gate", "shared.up", "shared.down"), plan.shared),
    }


def _outside_layers(op: Op, plan: RankPlan, behind: bool) -> list[Op]:
    """Return what an op outside the layers becomes: the first stage's, or the last one's."""
    if op.kind == "input":  # all ranks are given the rows
        return [op]
    if not (plan.last if behind else plan.first):
        return []
    if len(plan.group) == 1:
        return [op]
    if op.kind == "embedding" and op.attrs.get("index", "ids") == "ids":
        rows = (Operand(op.weights[0].name, rows=plan.vocab),)
        part = dataclasses.replace(op, weights=rows, attrs={**op.attrs, "first_row": plan.vocab[0]})
        return [part, Op("all_reduce", op.out, attrs={"ranks": plan.group})]
    if op.kind != "linear" or op.out != "logits":
        return [op]
    part = dataclasses.replace(
        op,
        out="logits_part",
        weights=(Operand(op.weights[0].name, rows=plan.vocab),),
        bias=tuple(Operand(b.name, rows=plan.vocab) for b in op.bias),
    )
    attrs = {"ranks": plan.group, "widths": plan.vocab_widths}
    return [part, Op("all_gather", op.out, ("logits_part",), attrs=attrs)]


def _inside_layer(op: Op, plan: RankPlan, cuts: dict[str, tuple[int, int]]) -> Op:
    """Return this rank's part of an op of a layer."""
    if op.kind == "experts":
        return _some_experts(op, plan.experts)
    if op.attrs.get("own_weights"):
        heads = plan.heads if op.out == "q" else plan.kv_heads
        return dataclasses.replace(op, weights=op.weights[slice(*heads)])
    if op.kind == "heads_linear":
        return dataclasses.replace(op, weights=op.weights[slice(*plan.heads)])
    if op.kind == "attention":
        table = tuple(Operand(w.name, columns=plan.heads) for w in op.weights)
        sinks = tuple(Operand(b.name, rows=plan.heads) for b in op.bias)
        return dataclasses.replace(op, weights=table, bias=sinks)
    if op.kind != "linear" or op.out == "router":
        return op
    name = op.weights[0].name
    role = name.split(".", 2)[2].removesuffix(".weight")
    if role not in cuts:  # attn.q_a, attn.kv_a: what they give is the same on every rank
        return op
    if role not in PARTIAL:
        bias = tuple(Operand(b.name, rows=cuts[role]) for b in op.bias)
        return dataclasses.replace(op, weights=(Operand(name, rows=cuts[role]),), bias=bias)
    # The bias belongs to the sum, so one rank alone adds it.
    return dataclasses.replace(
        op,
        weights=(Operand(name, columns=cuts[role]),),
        bias=op.bias if plan.index == 0 else (),
    )


def _shared_norm(
    program: Program, op: Op, plan: RankPlan, cuts: dict[str, tuple[int, int]]
) -> list[Op]:
    """Return the norm of all heads together, of which this rank holds some.

    A key head that several ranks store counts once, for the one with its first query head.
    """
    spec = program.spec
    attrs = {"width": program.buffers[op.out].width, "column": "qk".index(op.out)}
    weights = tuple(Operand(w.name, rows=cuts[f"attn.{op.out}"]) for w in op.weights)
    inputs = (op.out, "squares")
    norm = dataclasses.replace(op, inputs=inputs, weights=weights, attrs={**op.attrs, **attrs})
    if op.out == "k":
        return [norm]
    counts = plan.heads[0] == plan.kv_heads[0] * (spec.n_heads // spec.n_kv_heads)
    return [
        Op("sum_squares", "squares", ("q", "k"), layer=op.layer, attrs={"counts": (True, counts)}),
        Op("all_reduce", "squares", layer=op.layer, attrs={"ranks": plan.group}),
        norm,
    ]


def _some_experts(op: Op, experts: tuple[int, int]) -> Op:
    """Return a mixture with only some experts; what goes to others counts nothing."""
    n = len(op.weights) // 3
    mine = tuple(op.weights[part * n + j] for part in range(3) for j in range(*experts))
    bias = op.bias
    if op.attrs.get("biased"):
        bias = (*bias[:-3], *(Operand(b.name, rows=experts) for b in bias[-3:]))
    attrs = {**op.attrs, "experts": experts}
    return dataclasses.replace(op, weights=mine, bias=bias, attrs=attrs)
