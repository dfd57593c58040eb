"""What a step of a program costs: the bytes its rank sends."""

from __future__ import annotations

from nbflow.program.records import Op, Program

FLOAT32_BYTES = 4


def bytes_sent(program: Program, rank: int, n_tokens: int, n_logits: int) -> int:
    """Return the bytes that the program's rank sends in one step.

    Parameters
    ----------
    program : Program
        Program of the rank.
    rank : int
        The rank's number.
    n_tokens : int
        Tokens in the step.
    n_logits : int
        Rows whose logits are wanted.

    Returns
    -------
    int
        Payload bytes; a message to each of k ranks counts k times.
    """
    return sum(_op_bytes_sent(program, op, rank, n_tokens, n_logits) for op in program.ops)


def _op_bytes_sent(program: Program, op: Op, rank: int, n_tokens: int, n_logits: int) -> int:
    if op.kind not in ("all_reduce", "all_gather", "send"):
        return 0
    source = program.buffers[op.inputs[0] if op.inputs else op.out]
    payload = source.width * (n_tokens if source.rows == "tokens" else n_logits) * FLOAT32_BYTES
    peers = op.attrs["peers"] if op.kind == "send" else [r for r in op.attrs["ranks"] if r != rank]
    return payload * len(peers)
