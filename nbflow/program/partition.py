"""Cut one rank's part out of a program and insert what it must communicate.

Within a stage, q, k, v, gate, up and the head are cut by rows (each rank computes some columns of
the result), o and down by columns (each rank computes a partial sum, summed over the stage by an
all-reduce: two per layer).  Between stages the hidden states are sent.
"""

from __future__ import annotations

import dataclasses

from nbflow.parallel.plan import RankPlan, split_evenly
from nbflow.program.records import Buffer, Op, Operand, Program


def partition(program: Program, plan: RankPlan) -> Program:
    """Return the program of one rank."""
    spec = program.spec
    cuts = _row_cuts(program, plan)
    ops: list[Op] = []
    if plan.receives_from is not None:
        ops.append(Op("recv", "x", attrs={"peer": plan.receives_from}))
    for op in program.ops:
        if op.layer is None:
            ops += _outside_layers(op, plan, spec.vocab_size)
        elif plan.layers[0] <= op.layer < plan.layers[1]:
            ops += _inside_layer(op, plan, cuts)
    if plan.sends_to:
        ops.append(Op("send", "x", ("x",), attrs={"peers": plan.sends_to}))
    n_heads = plan.heads[1] - plan.heads[0]
    n_kv_heads = plan.kv_heads[1] - plan.kv_heads[0]
    widths = {
        "q": n_heads * spec.head_dim,
        "a": n_heads * spec.head_dim,
        "k": n_kv_heads * spec.head_dim,
        "v": n_kv_heads * spec.head_dim,
        **dict.fromkeys(("gate", "up", "f"), plan.ffn[1] - plan.ffn[0]),
    }
    buffers = {
        name: dataclasses.replace(buffer, width=widths.get(name, buffer.width))
        for name, buffer in program.buffers.items()
    }
    if plan.last and len(plan.group) > 1:
        buffers["logits_part"] = Buffer(plan.vocab[1] - plan.vocab[0], "logits")
    if not plan.last:
        del buffers["y"], buffers["logits"]
    return Program(spec, tuple(ops), buffers, n_heads, n_kv_heads, tuple(range(*plan.layers)))


def _row_cuts(program: Program, plan: RankPlan) -> dict[str, tuple[int, int]]:
    """Return, for each kind of matrix, the rows (or columns) this rank holds."""
    D = program.spec.head_dim
    q = (plan.heads[0] * D, plan.heads[1] * D)
    kv = (plan.kv_heads[0] * D, plan.kv_heads[1] * D)
    return {
        "attn.q": q,
        "attn.k": kv,
        "attn.v": kv,
        "attn.o": q,
        "ffn.gate": plan.ffn,
        "ffn.up": plan.ffn,
        "ffn.down": plan.ffn,
    }


def _outside_layers(op: Op, plan: RankPlan, vocab_size: int) -> list[Op]:
    if op.kind == "embedding":
        return [op] if plan.first else []
    if not plan.last:
        return []
    if op.kind == "linear" and len(plan.group) > 1:
        part = dataclasses.replace(
            op, out="logits_part", weights=(Operand(op.weights[0].name, rows=plan.vocab),)
        )
        widths = tuple(b - a for a, b in split_evenly(vocab_size, len(plan.group)))
        attrs = {"ranks": plan.group, "widths": widths}
        gather = Op("all_gather", op.out, ("logits_part",), attrs=attrs)
        return [part, gather]
    return [op]


def _inside_layer(op: Op, plan: RankPlan, cuts: dict[str, tuple[int, int]]) -> list[Op]:
    if op.kind != "linear" or len(plan.group) == 1:
        return [op]
    name = op.weights[0].name
    role = name.split(".", 2)[2].removesuffix(".weight")
    if role not in ("attn.o", "ffn.down"):
        bias = tuple(Operand(b.name, rows=cuts[role]) for b in op.bias)
        return [dataclasses.replace(op, weights=(Operand(name, rows=cuts[role]),), bias=bias)]
    # The bias belongs to the sum, so one rank alone adds it.
    partial = dataclasses.replace(
        op,
        weights=(Operand(name, columns=cuts[role]),),
        bias=op.bias if plan.index == 0 else (),
    )
    return [partial, Op("all_reduce", op.out, layer=op.layer, attrs={"ranks": plan.group})]
