"""Shuffles, votes, matches and reductions, whole warps and parts of them."""

from __future__ import annotations

import numpy as np
import pytest
from ptx.one_instruction import execute, kernel_text

from nbflow_ptx import NO_CHECKS, Emulator

LANES = np.arange(64)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 16, 4])
@pytest.mark.parametrize("by", [0, 1, 3, 15, 31])
def test_shuffle(mode: str, width: int, by: int) -> None:
    """The reference: CUDA's description of __shfl_*_sync with a width."""
    x = (np.arange(64) * 3 + 1).astype(np.uint32)
    clamp = ((32 - width) << 8) | (0 if mode == "up" else 31)
    body = f"shfl.sync.{mode}.b32 %d0|%q, %a0, {by}, {clamp}, 0xffffffff; selp.u32 %d1, 1, 0, %q;"
    got, inside = execute(body, [x], np.uint32, np.uint32)
    for t in range(64):
        lane, start = t % 32, t % 32 // width * width
        source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": start + by % width}[
            mode
        ]
        ok = start <= source < start + width if mode != "bfly" else source < start + width
        assert inside[t] == ok
        assert got[t] == x[t // 32 * 32 + (source if ok else lane)]


def test_vote() -> None:
    x = ((LANES % 5 == 0) | (LANES >= 32)).astype(np.uint32)
    body = """setp.ne.u32 %q, %a0, 0; vote.sync.ballot.b32 %d0, %q, 0xffffffff;
        vote.sync.any.pred %q2, %q, 0xffffffff; selp.u32 %d1, 1, 0, %q2;
    vote.sync.all.pred %q2, %q, 0xffffffff; selp.u32 %d2, 1, 0, %q2;
    vote.sync.uni.pred %q2, %q, 0xffffffff; selp.u32 %d3, 1, 0, %q2;"""
    ballot, some, every, same = execute(body, [x], *[np.uint32] * 4)
    bits = sum(1 << k for k in range(0, 32, 5))
    assert ballot.tolist() == [bits] * 32 + [2**32 - 1] * 32
    assert some.tolist() == [1] * 64
    assert every.tolist() == [0] * 32 + [1] * 32
    assert same.tolist() == [0] * 32 + [1] * 32


def test_match() -> None:
    x = np.where(LANES < 32, LANES % 3, 9).astype(np.uint32)
    body = """match.any.sync.b32 %d0, %a0, 0xffffffff;
        match.all.sync.b32 %d1|%q, %a0, 0xffffffff; selp.u32 %d2, 1, 0, %q;"""
    some, every, all_same = execute(body, [x], *[np.uint32] * 3)
    want = [sum(1 << k for k in range(32) if k % 3 == t % 3) for t in range(32)]
    assert some.tolist() == want + [2**32 - 1] * 32
    assert every.tolist() == [0] * 32 + [2**32 - 1] * 32
    assert all_same.tolist() == [0] * 32 + [1] * 32


@pytest.mark.parametrize(
    ("op", "kind", "f"),
    [
        ("add", "u32", np.add),
        ("min", "s32", np.minimum),
        ("max", "s32", np.maximum),
        ("max", "u32", np.maximum),
        ("and", "b32", np.bitwise_and),
        ("or", "b32", np.bitwise_or),
        ("xor", "b32", np.bitwise_xor),
    ],
)
def test_reduce_within_masks(op: str, kind: str, f: np.ufunc) -> None:
    """Even and odd lanes call with different masks, in one instruction."""
    x = np.random.default_rng(0).integers(0, 2**32, 64, dtype=np.uint32)
    masks = np.where(LANES % 2, 0xAAAAAAAA, 0x55555555).astype(np.uint32)
    got = execute(f"redux.sync.{op}.{kind} %d0, %a0, %a1;", [x, masks], np.uint32)
    v = x.view(np.int32) if kind[0] == "s" else x
    for t in range(64):
        mine = v[t // 32 * 32 : t // 32 * 32 + 32][t % 2 :: 2]
        assert got[t] == f.reduce(mine).astype(v.dtype).view(np.uint32)


def test_part_of_a_warp_in_a_branch() -> None:
    """Lanes below 8 shuffle among themselves; activemask names the lanes that are together."""
    x = np.arange(64, dtype=np.uint32)
    body = """setp.lt.u32 %q, %a1, 8; mov.u32 %d0, 99; mov.u32 %d1, 0; @!%q bra $out;
    shfl.sync.bfly.b32 %d0, %a0, 1, 31, 0xff; activemask.b32 %d1;
    $out:"""
    got, active = execute(body, [x, (x % 32).astype(np.uint32)], np.uint32, np.uint32)
    assert got.tolist() == [t ^ 1 if t % 32 < 8 else 99 for t in range(64)]
    assert active.tolist() == [255 if t % 32 < 8 else 0 for t in range(64)]


def test_a_block_that_is_no_multiple_of_a_warp() -> None:
    """The full mask is right for the last, short warp."""
    text = kernel_text("setp.eq.u32 %q, 0, 0; vote.sync.ballot.b32 %d0, %q, 0xffffffff;", [], [4])
    out = np.zeros(80, np.uint32)
    Emulator(text).launch("k", 2, 40, out)
    assert out.tolist() == ([2**32 - 1] * 32 + [255] * 8) * 2


def test_wrong_masks_with_the_check_off() -> None:
    """Nothing hangs: the lanes that arrived continue."""
    text = kernel_text(
        "setp.lt.u32 %q, %t, 16; mov.u32 %d0, 7;@%q shfl.sync.bfly.b32 %d0, %t, 1, 31, 0xffffffff;",
        [],
        [4],
    )
    out = np.zeros(32, np.uint32)
    Emulator(text, checks=NO_CHECKS).launch("k", 1, 32, out)
    assert out.tolist() == [t ^ 1 if t < 16 else 7 for t in range(32)]


def test_nested_divergence_meets_again() -> None:
    """Loops of different lengths in branches: every thread computes its own, and all meet."""
    body = """mov.u32 %d0, 0; rem.u32 %x0, %a0, 7; setp.gt.u32 %q, %x0, 3; @%q bra $other;
    $loop: setp.ge.u32 %q2, %d0, %x0; @%q2 bra $join; add.u32 %d0, %d0, 1; bra $loop;
    $other: mul.lo.u32 %d0, %a0, 2;
    $join: vote.sync.ballot.b32 %d1, %q, 0xffffffff;"""
    x = np.arange(64, dtype=np.uint32)
    got, ballot = execute(body, [x], np.uint32, np.uint32, declare=".reg .b32 %x<2>;")
    assert got.tolist() == [2 * t if t % 7 > 3 else t % 7 for t in range(64)]
    assert ballot.tolist() == [
        sum(1 << k for k in range(32) if (w + k) % 7 > 3) for w in (0,) * 32 + (32,) * 32
    ]


def test_branch_table() -> None:
    body = """rem.u32 %x0, %a0, 3; $table: .branchtargets $zero, $one, $two; brx.idx %x0, $table;
    $zero: mov.u32 %d0, 10; bra $end; $one: mov.u32 %d0, 11; bra $end; $two: mov.u32 %d0, 12;
    $end:"""
    x = np.arange(64, dtype=np.uint32)
    assert execute(body, [x], np.uint32, declare=".reg .b32 %x<2>;").tolist() == [
        10 + t % 3 for t in range(64)
    ]
