"""Loads, stores, atomics and asynchronous copies."""

from __future__ import annotations

import numpy as np
import pytest
from ptx.one_instruction import as_bits, execute

from nbflow_ptx import NO_CHECKS, Emulator, KernelFault, UnsupportedInstruction
from nbflow_ptx.memory.device import Device

HEAD = ".version 8.4\n.target sm_80\n.address_size 64\n"


def run(
    body: str,
    *arrays: np.ndarray,
    threads: int = 32,
    blocks: int = 1,
    shared: int = 0,
    top: str = "",
) -> None:
    """Run a kernel whose parameters %x0, %x1.. are the arrays."""
    params = ", ".join(f".param .u64 p{k}" for k in range(len(arrays)))
    loads = "".join(f"ld.param.u64 %x{k}, [p{k}];" for k in range(len(arrays)))
    text = f"""{HEAD}{top}.visible .entry k({params}) {{
        .reg .b64 %x<8>, %y<8>; .reg .b32 %r<16>; .reg .b16 %h<4>; .reg .f32 %f<8>;
        .reg .pred %p<4>;
        .shared .align 16 .b8 tile[1024]; .local .align 16 .b8 own[64];
        {loads} mov.u32 %r0, %tid.x; {body} ret; }}"""
    Emulator(text).launch("k", blocks, threads, *arrays, shared_bytes=shared)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("u8", "u1"),
        ("s8", "i1"),
        ("u16", "u2"),
        ("s16", "i2"),
        ("u32", "u4"),
        ("s32", "i4"),
        ("b64", "u8"),
    ],
)
@pytest.mark.parametrize("space", ["global", ""])
def test_load_extends_and_store_cuts(kind: str, dtype: str, space: str) -> None:
    """A narrow value in a wide register is sign- or zero-extended; a store takes its low part."""
    x = np.frombuffer(np.random.default_rng(0).bytes(32 * 8), dtype)[:32].copy()
    y, wide = np.zeros(32, dtype), np.zeros(32, np.int64)
    w = x.itemsize
    dot = f".{space}" if space else ""
    run(
        f"""mad.wide.u32 %y0, %r0, {w}, %x0; ld{dot}.{kind} %y1, [%y0];
        mad.wide.u32 %y0, %r0, {w}, %x1; st{dot}.{kind} [%y0], %y1;
        mad.wide.u32 %y0, %r0, 8, %x2; st{dot}.b64 [%y0], %y1;""",
        x, y, wide,
    )  # fmt: skip
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(
        wide, x.astype(np.int64 if dtype[0] == "i" else np.uint64).view(np.int64)
    )


def test_vectors_and_offsets() -> None:
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    run(
        """mad.wide.u32 %y0, %r0, 16, %x0;
            ld.global.nc.L1::no_allocate.v4.f32 {%f0, %f1, %f2, %f3}, [%y0];
        mad.wide.u32 %y1, %r0, 16, %x1; st.global.v2.f32 [%y1+8], {%f0, %f1};
        st.global.v2.f32 [%y1], {%f2, %f3};""",
        x, y,
    )  # fmt: skip
    np.testing.assert_array_equal(y.reshape(-1, 2, 2), x.reshape(-1, 2, 2)[:, ::-1])


def test_generic_addresses_of_three_spaces() -> None:
    """One load instruction whose lanes read shared, local and global memory."""
    x, y = np.arange(32, dtype=np.uint32) + 100, np.zeros(32, np.uint32)
    run(
        """mul.lo.u32 %r1, %r0, 4; mov.u32 %r2, tile; add.u32 %r2, %r2, %r1; add.u32 %r3, %r0, 200;
        st.shared.u32 [%r2], %r3; cvt.u64.u32 %y0, %r2; cvta.shared.u64 %y0, %y0;
        mov.u64 %y1, own; add.u32 %r3, %r0, 300; st.local.u32 [%y1+8], %r3;
        cvta.local.u64 %y1, %y1; add.u64 %y1, %y1, 8;
        mad.wide.u32 %y2, %r0, 4, %x0; rem.u32 %r4, %r0, 3; setp.eq.u32 %p0, %r4, 0;
        setp.eq.u32 %p1, %r4, 1;
        selp.b64 %y3, %y0, %y2, %p0; selp.b64 %y3, %y1, %y3, %p1; ld.u32 %r5, [%y3];
        isspacep.shared %p2, %y3; @%p2 add.u32 %r5, %r5, 1000; isspacep.local %p2, %y3;
        @%p2 add.u32 %r5, %r5, 2000;
        mad.wide.u32 %y4, %r0, 4, %x1; st.u32 [%y4], %r5;""",
        x, y,
    )  # fmt: skip
    t = np.arange(32)
    np.testing.assert_array_equal(y, t + np.array([1200, 2300, 100])[t % 3])


def test_variables_with_initial_values() -> None:
    top = """.const .align 4 .u32 table[4] = {3, 1, 0x10, 7};
        .global .align 8 .u64 pointer[1] = {table};
    .global .f32 scale = 0f40400000;"""
    y = np.zeros(3, np.uint32)
    run(
        """ld.const.u32 %r1, [table+8]; st.global.u32 [%x0], %r1; ld.global.u64 %y0, [pointer];
            ld.u32 %r1, [%y0+12];
        st.global.u32 [%x0+4], %r1; ld.global.f32 %f0, [scale]; st.global.f32 [%x0+8], %f0;""",
        y, threads=1, top=top,
    )  # fmt: skip
    assert y.tolist() == [16, 7, 0x40400000]


def test_modules_do_not_share_variables_of_a_name() -> None:
    device, found = Device(1 << 16), []
    for value in (3, 5, 3):
        text = f"""{HEAD}.const .align 4 .u32 table[1] = {{{value}}};
            .visible .entry k(.param .u64 p) {{ .reg .b64 %x; .reg .b32 %r;
            ld.param.u64 %x, [p]; ld.const.u32 %r, [table]; st.global.u32 [%x], %r; ret; }}"""
        y = np.zeros(1, np.uint32)
        Emulator(text).launch("k", 1, 1, y, device=device)
        found.append(int(y[0]))
    assert found == [3, 5, 3]


ATOMS = {
    ("add", "u32"): sum, ("min", "s32"): min, ("max", "s32"): max, ("add", "u64"): sum,
    ("min", "u64"): min, ("max", "u32"): max,
}  # fmt: skip


@pytest.mark.parametrize(("op", "kind"), list(ATOMS))
@pytest.mark.parametrize("cells", [1, 5])
def test_atomics_give_every_thread_its_own_turn(op: str, kind: str, cells: int) -> None:
    """The old values are those of some order, and the end is that of all."""
    dtype = {"u": "u", "s": "i"}[kind[0]] + str(int(kind[1:]) // 8)
    rng = np.random.default_rng(1)
    x = rng.integers(0, 100, 64).astype(dtype) - np.array(50, dtype) * (kind[0] == "s")
    memory, old = np.full(cells, 7, dtype), np.zeros(64, dtype)
    w = x.itemsize
    bits = 8 * w
    register = "%y5" if w == 8 else "%r5"
    value = "%y6" if w == 8 else "%r6"
    run(
        f"""mad.wide.u32 %y0, %r0, {w}, %x0; ld.global.b{bits} {value}, [%y0];
            rem.u32 %r1, %r0, {cells};
        mad.wide.u32 %y1, %r1, {w}, %x1; atom.global.{op}.{kind} {register}, [%y1], {value};
        mad.wide.u32 %y0, %r0, {w}, %x2; st.global.b{bits} [%y0], {register};""",
        x, memory, old, threads=64,
    )  # fmt: skip
    for c in range(cells):
        mine, seen = x[c::cells].tolist(), old[c::cells].tolist()
        f = ATOMS[op, kind]
        assert memory[c] == f([7, *mine])
        state = 7
        for v, s in zip(mine, seen, strict=True):  # the emulator's order is that of the threads
            assert s == state
            state = f([state, v])


def test_logic_exchange_compare_and_swap_and_wrapping_counters() -> None:
    memory = np.array([0xFF00, 0x00F0, 0x0F0F, 5, 5, 0, 0, 0], np.uint32)
    old = np.zeros(8, np.uint32)
    run(
        """atom.global.and.b32 %r1, [%x0], 0xF0F0; st.global.u32 [%x1], %r1;
            atom.global.or.b32 %r1, [%x0+4], 15; st.global.u32 [%x1+4], %r1;
        red.global.xor.b32 [%x0+8], 0xFF; atom.global.cas.b32 %r1, [%x0+12], 5, 9;
        st.global.u32 [%x1+12], %r1;
        atom.global.cas.b32 %r1, [%x0+16], 6, 9; st.global.u32 [%x1+16], %r1;
        atom.global.exch.b32 %r1, [%x0+20], 77;
        atom.global.inc.u32 %r1, [%x0+24], 2; atom.global.inc.u32 %r1, [%x0+24], 2;
        atom.global.inc.u32 %r1, [%x0+24], 2; atom.global.inc.u32 %r1, [%x0+24], 2;
        atom.global.dec.u32 %r1, [%x0+28], 3;""",
        memory, old, threads=1,
    )  # fmt: skip
    assert memory.tolist() == [0xF000, 0xFF, 0x0FF0, 9, 5, 77, 1, 3]
    assert old[:5].tolist() == [0xFF00, 0x00F0, 0, 5, 5]


def test_float_atomics() -> None:
    """Sums of small integers are exact in any order."""
    f32, f64, f16 = np.zeros(1, np.float32), np.zeros(1, np.float64), np.zeros(2, np.float16)
    run(
        """cvt.rn.f32.u32 %f0, %r0; atom.global.add.f32 %f1, [%x0], %f0; cvt.rn.f64.u32 %y0, %r0;
            red.global.add.f64 [%x1], %y0;
        mov.u32 %r1, 0x3C004000; atom.global.add.noftz.f16x2 %r2, [%x2], %r1;""",
        f32, f64, f16,
    )  # fmt: skip
    assert f32[0] == f64[0] == 496
    assert f16.tolist() == [64, 32]


def test_shared_atomics_are_per_block() -> None:
    y = np.zeros(3, np.uint32)
    run(
        """setp.eq.u32 %p0, %r0, 0; @%p0 st.shared.u32 [tile], 0; bar.sync 0;
            atom.shared.add.u32 %r1, [tile], %r0;
        bar.sync 0; ld.shared.u32 %r1, [tile]; mov.u32 %r2, %ctaid.x;
        mad.wide.u32 %y0, %r2, 4, %x0; st.global.u32 [%y0], %r1;""",
        y, threads=64, blocks=3,
    )  # fmt: skip
    assert y.tolist() == [2016] * 3


@pytest.mark.parametrize("n", [4, 8, 16])
def test_async_copy_arrives_with_its_group(n: int) -> None:
    """Two groups are under way; wait_group 1 lands the first, wait_all the second."""
    x, y = np.arange(32 * 2 * n, dtype=np.uint8), np.zeros(32 * 2 * n, np.uint8)
    run(
        f"""mul.lo.u32 %r1, %r0, {n}; mov.u32 %r2, tile; add.u32 %r2, %r2, %r1;
            cvt.u64.u32 %y0, %r1; add.u64 %y0, %x0, %y0;
        cp.async.ca.shared.global [%r2], [%y0], {n}; cp.async.commit_group;
        cp.async.ca.shared.global [%r2+{32 * n}], [%y0+{32 * n}], {n}; cp.async.commit_group;
        cp.async.wait_group 1; cvt.u64.u32 %y1, %r1; add.u64 %y1, %x1, %y1;
        ld.shared.u32 %r3, [%r2]; st.global.u32 [%y1], %r3; cp.async.wait_all;
        ld.shared.u32 %r3, [%r2+{32 * n}];
        st.global.u32 [%y1+{32 * n}], %r3;""",
        x, y,
    )  # fmt: skip
    view = (2, 32, n)
    np.testing.assert_array_equal(y.reshape(view)[:, :, :4], x.reshape(view)[:, :, :4])


def test_async_copy_fills_with_zeros() -> None:
    """Bytes past the source size are zero, and are not read from the source."""
    x, y = np.arange(1, 33, dtype=np.uint8), np.zeros(16, np.uint8)
    run(
        """mov.u32 %r1, 5; mov.u32 %r2, tile; cp.async.cg.shared.global [%r2], [%x0], 16, %r1;
            cp.async.wait_all;
        ld.shared.v2.u64 {%y0, %y1}, [%r2]; st.global.v2.u64 [%x1], {%y0, %y1};""",
        x, y, threads=1,
    )  # fmt: skip
    assert y.tolist() == [1, 2, 3, 4, 5] + [0] * 11


def test_async_copy_the_kernel_never_waits_for() -> None:
    x = np.zeros(16, np.uint8)
    with pytest.raises(KernelFault, match="never waits for"):
        run("mov.u32 %r2, tile; cp.async.cg.shared.global [%r2], [%x0], 16;", x, threads=1)


def test_out_of_bounds_atomics_and_copies_with_the_check_off() -> None:
    """Such accesses are dropped and read zero; the other threads continue."""
    text = f"""{HEAD}.visible .entry k(.param .u64 x, .param .u64 y) {{
    .shared .align 16 .b8 tile[64]; .reg .b64 %x, %y, %a; .reg .b32 %r<6>;
    ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mov.u32 %r0, %tid.x;
    mul.lo.u32 %r1, %r0, 100000; cvt.u64.u32 %a, %r1; add.u64 %a, %x, %a;
    atom.global.add.u32 %r2, [%a], 5;
    mov.u32 %r3, tile; mul.lo.u32 %r4, %r0, 4096; add.u32 %r3, %r3, %r4;
    cp.async.ca.shared.global [%r3], [%x], 4; cp.async.wait_all;
    mad.wide.u32 %a, %r0, 4, %y; st.global.u32 [%a], %r2; ret; }}"""
    x, y = np.array([7], np.uint32), np.ones(2, np.uint32)
    Emulator(text, checks=NO_CHECKS).launch("k", 1, 2, x, y)
    assert x.tolist() == [12]
    assert y.tolist() == [7, 0]


def test_arguments_behind_a_pointer() -> None:
    """A struct argument of a call or of the kernel, read through its address."""
    text = f"""{HEAD}.func (.param .b32 r) pick(.param .align 8 .b8 s[16])
    {{ .reg .b64 %p; .reg .b32 %r;
    mov.b64 %p, s; ld.param.b32 %r, [%p+8]; st.param.b32 [r], %r; ret; }}
    .visible .entry k(.param .u64 y, .param .align 8 .b8 big[16])
    {{ .reg .b64 %y, %p, %g; .reg .b32 %r<4>; ld.param.u64 %y, [y];
    mov.b64 %p, big; ld.param.b32 %r0, [%p+4]; cvta.param.u64 %g, %p; ld.u32 %r1, [%g+12];
    {{ .param .align 8 .b8 param0[16]; st.param.b32 [param0+8], %r1; .param .b32 retval0;
    call.uni (retval0), pick, (param0); ld.param.b32 %r2, [retval0+0]; }}
    st.global.v2.u32 [%y], {{%r0, %r2}}; ret; }}"""
    y = np.zeros(2, np.uint32)
    Emulator(text).launch("k", 1, 1, y, np.arange(4, dtype=np.uint32).tobytes())
    assert y.tolist() == [1, 3]


@pytest.mark.parametrize(
    "line",
    [
        "wgmma.fence.sync.aligned;",
        "cp.async.bulk.commit_group;",
        "frobnicate.u32 %r1, %r0;",
        "shfl.b32 %r1, %r0, 1;",
        "mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f16 {%r1}, {%r1}, {%r1}, {%r1};",
    ],
)
def test_unsupported_instructions_are_named_with_their_line(line: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=r"PTX line \d+") as e:
        run(line, np.zeros(1, np.uint32))
    assert line.split()[0].rstrip(";") in str(e.value)


def test_special_registers() -> None:
    text = f"""{HEAD}.visible .entry k(.param .u64 p) {{ .reg .b32 %r<16>; .reg .b64 %x<3>;
    ld.param.u64 %x0, [p]; mov.u32 %r0, %tid.x; mov.u32 %r1, %tid.y; mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ctaid.y;
    mov.u32 %r5, %ntid.y; mad.lo.u32 %r6, %r1, %r2, %r0; mov.u32 %r7, %nctaid.x;
    mad.lo.u32 %r8, %r4, %r7, %r3;
    mul.lo.u32 %r9, %r2, %r5; mad.lo.u32 %r10, %r8, %r9, %r6; mov.u32 %r11, %laneid;
    mov.u32 %r12, %lanemask_lt; mov.u32 %r13, %warpid;
    mad.wide.u32 %x1, %r10, 16, %x0; st.global.v4.u32 [%x1], {{%r10, %r11, %r12, %r13}}; ret; }}"""
    out = np.zeros((3 * 2 * 40, 4), np.uint32)
    Emulator(text).launch("k", (3, 2), (8, 5), out)
    t = np.arange(240)
    lane = t % 40 % 32
    np.testing.assert_array_equal(out, np.stack([t, lane, (1 << lane) - 1, t % 40 // 32], 1))


def test_float_bits_survive_memory() -> None:
    """A signalling NaN is not touched by loads, moves and stores."""
    x = np.array([0x7F800001, 0xFFC12345], np.uint32)
    assert execute("mov.f32 %d0, %a0;", [x], np.uint32).tolist() == x.tolist()
    assert as_bits(x).tolist() == x.tolist()
