"""Fuse ops of a program: fewer kernel calls, the same results.

- Consecutive linears of one input (q, k, v; gate and up) become one with concatenated weights;
  their outputs become columns of one buffer.  A router stays by itself, in its own type.
- A linear whose output is added to a buffer accumulates into it directly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nbflow.program.records import Buffer, Op, Program


def fuse(program: Program) -> Program:
    """Return the fused program."""
    return _fuse_adds(_fuse_linears(program))


def _join_neighbours(ops: Sequence[Op]) -> list[Op]:
    """Return the ops with neighbouring products of the same input as one, ``q_k_v``."""
    joined: list[Op] = []
    for op in ops:
        last = joined[-1] if joined else None
        if (
            last is not None
            and op.kind == last.kind == "linear"
            and op.inputs == last.inputs
            and bool(op.bias) == bool(last.bias)
            and op.attrs == last.attrs
            and "router" not in (op.out, last.out)
        ):
            joined[-1] = dataclasses.replace(
                last,
                out=f"{last.out}_{op.out}",
                weights=last.weights + op.weights,
                bias=last.bias + op.bias,
            )
        else:
            joined.append(op)
    return joined


def _fuse_linears(program: Program) -> Program:
    buffers = dict(program.buffers)
    ops = _join_neighbours(program.ops)
    bases: dict[str, str] = {}
    for i, op in reversed(list(enumerate(ops))):
        parts = op.out.split("_")
        if op.kind != "linear" or len(parts) == 1 or op.out in program.buffers:
            continue
        if any(bases.setdefault(part, op.out) != op.out for part in parts):
            ops[i : i + 1] = _apart(op, parts)  # columns of another layer's fused buffer
    for op in ops:
        if op.kind == "linear" and len(op.weights) > 1:
            offset = 0
            for part in op.out.split("_"):
                width = buffers[part].width
                buffers[part] = Buffer(width, base=op.out, offset=offset)
                offset += width
            buffers[op.out] = Buffer(offset)
    fused = [
        dataclasses.replace(op, inputs=("_".join(op.inputs),))
        if op.kind == "gate" and "_".join(op.inputs) in buffers
        else op
        for op in ops
    ]
    return dataclasses.replace(program, ops=tuple(fused), buffers=buffers)


def _apart(op: Op, parts: list[str]) -> list[Op]:
    """Return the linears that a fused one consists of."""
    bias = op.bias or [None] * len(parts)
    return [
        dataclasses.replace(op, out=part, weights=(w,), bias=() if b is None else (b,))
        for part, w, b in zip(parts, op.weights, bias, strict=True)
    ]


def _fuse_adds(program: Program) -> Program:
    ops: list[Op] = []
    for op in program.ops:
        last = ops[-1] if ops else None
        if (
            last is not None
            and op.kind == "add"
            and not op.attrs
            and last.kind == "linear"
            and not last.attrs.get("accumulate")  # else its output is more than the product
            and op.inputs == (last.out,)
        ):
            attrs = {**last.attrs, "accumulate": True}
            ops[-1] = dataclasses.replace(last, out=op.out, attrs=attrs)
        else:
            ops.append(op)
    return dataclasses.replace(program, ops=tuple(ops))
