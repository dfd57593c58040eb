"""Vectors of bytes: the same numbers with whatever instructions a processor has."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from llvmlite import binding, ir
from numba import njit
from numba.core import extending

from nbflow_kernels.cpu import isa, simd, simd_bits, simd_int8, simd_shuffle

X86 = [
    frozenset({"x86"}),
    frozenset({"x86", "ssse3"}),
    frozenset({"x86", "ssse3", "avx2"}),
    frozenset({"x86", "ssse3", "avx2", "avxvnni"}),
    frozenset({"x86", "ssse3", "avx2", "avx512bw"}),
    frozenset({"x86", "ssse3", "avx2", "avx512bw", "avx512vbmi", "gfni", "avx512vnni"}),
]
# what this processor cannot run is only compiled, in the last test
RUNNABLE = [features for features in X86 if features <= isa.features()] or [isa.features()]
NAMES = ["-".join(sorted(features)) for features in RUNNABLE]


def run(function, *arrays: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Apply a function of byte vectors to 64 bytes at a time."""
    addresses = [np.ascontiguousarray(a) for a in arrays]
    for i in range(0, len(out.view(np.uint8)), 64):
        function(*(a.view(np.uint8)[i:] for a in addresses), out.view(np.uint8)[i:])
    return out


@functools.cache
def dot_kernel(features, seven):
    dot = simd_int8.make_dot("dot", seven, features)

    @njit
    def kernel(acc, u, s, out):
        sums = simd.load_i32(simd.address(acc))
        u, s = simd_int8.load_bytes(simd.address(u)), simd_int8.load_bytes(simd.address(s))
        simd.store_i32(simd.address(out), dot(sums, u, s))

    return kernel


@pytest.mark.parametrize("features", RUNNABLE, ids=NAMES)
@pytest.mark.parametrize("seven", [False, True])
def test_dot_products_are_exact(features, seven):
    rng = np.random.default_rng(0)
    top = 127 if seven else 255
    u = rng.integers(0, top + 1, 64 * 20).astype(np.uint8)
    s = rng.integers(-128, 128, 64 * 20).astype(np.int8)
    u[:256], s[:128], s[128:256] = top, -128, 127  # the largest sums
    acc = rng.integers(-(2**30), 2**30, 16 * 20).astype(np.int32)
    want = acc + (u.astype(np.int32) * s).reshape(-1, 4).sum(axis=1)
    got = run(dot_kernel(features, seven), acc, u, s, out=np.zeros_like(acc))
    assert np.array_equal(got, want)


@functools.cache
def unary_kernel(features, which):
    operation = {
        "first": lambda: simd_int8.make_pair("first", False, features),
        "second": lambda: simd_int8.make_pair("second", True, features),
    }[which]()

    @njit
    def kernel(c, out):
        v = operation(simd_int8.load_bytes(simd.address(c)))
        simd_int8.store_bytes(simd.address(out), v)

    return kernel


@pytest.mark.parametrize("features", RUNNABLE, ids=NAMES)
def test_pairs_of_all_codes_without_division(features):
    c = np.arange(256, dtype=np.uint8)  # the top bit does not count
    x = run(unary_kernel(features, "first"), c, out=np.zeros_like(c))
    y = run(unary_kernel(features, "second"), c, out=np.zeros_like(c))
    code = c & 127
    assert np.array_equal(x[code < 121], code[code < 121] % 11)
    assert np.array_equal(y[code < 121], code[code < 121] // 11)
    for text in unary_kernel(features, "second").inspect_asm().values():
        assert "div" not in text


def bits_kernel(features, emit):
    """Return a kernel of an emitter of `simd_bits` that takes 64 bytes."""

    @extending.intrinsic
    def operation(typing_context, v):
        def codegen(context, builder, signature, args):
            return emit(builder, args[0], features)

        return simd.i8x64(v), codegen

    @njit
    def kernel(v, out):
        v = operation(simd_int8.load_bytes(simd.address(v)))
        simd_int8.store_bytes(simd.address(out), v)

    return kernel


@pytest.mark.parametrize("features", RUNNABLE, ids=NAMES)
@pytest.mark.parametrize(("first", "step"), [(0, 2), (11, 3), (5, 4), (-3, 2), (20, 3)])
def test_windows_of_bits(features, first, step):
    def emit(builder, v, features):
        words = builder.bitcast(v, simd.i32x16.llvm)
        return simd_bits.emit_windows(builder, words, first, step, features)

    words = np.random.default_rng(3).integers(0, 1 << 32, 16).astype(np.uint32)
    got = run(bits_kernel(features, emit), words, out=np.zeros(64, np.uint8)).reshape(16, 4)
    for j in range(4):
        start = first + step * j
        low, high = max(0, -start), min(8, 32 - start)  # other bits of the byte are arbitrary
        mask = (1 << high) - (1 << low)
        want = (words.astype(np.uint64) << 8 >> np.uint64(start + 8)).astype(np.uint64) & mask
        assert np.array_equal(got[:, j] & mask, want)


@pytest.mark.parametrize("features", RUNNABLE, ids=NAMES)
def test_lookup_among_128(features):
    table = np.random.default_rng(4).integers(0, 256, 128).astype(np.uint8)

    def emit(builder, v, features):
        return simd_bits.emit_lookup128(builder, table.tolist(), v, features)

    index = np.arange(256, dtype=np.uint8)  # the top bit does not count
    got = run(bits_kernel(features, emit), index, out=np.zeros(256, np.uint8))
    assert np.array_equal(got, table[index & 127])


@pytest.mark.parametrize("features", RUNNABLE, ids=NAMES)
def test_lookup_of_integers(features):
    lookup = simd_shuffle.make_lookup(features)

    @njit
    def kernel(table, index, out):
        t, i = simd.load_i32(simd.address(table)), simd.load_i32(simd.address(index))
        simd.store_i32(simd.address(out), lookup(t, i))

    rng = np.random.default_rng(1)
    table = rng.integers(-1000, 1000, 16).astype(np.int32)
    index = rng.permutation(16).astype(np.int32)
    assert np.array_equal(run(kernel, table, index, out=np.zeros(16, np.int32)), table[index])


@pytest.mark.parametrize("features", RUNNABLE, ids=NAMES)
def test_moves_of_bits(features):
    move = simd_int8.make_move(features)

    @njit
    def kernel(v, out):
        v = simd_int8.load_bytes(simd.address(v))
        at = simd.address(out)
        simd_int8.store_bytes(at, move(v, 5, 0, 3))
        simd_int8.store_bytes(at + 64, move(v, 1, 4, 2))
        simd_int8.store_bytes(at + 128, move(v, 7, 7, 1))

    v = np.random.default_rng(2).integers(0, 256, 64).astype(np.uint8)
    out = np.zeros((3, 64), np.uint8)
    kernel(v, out.reshape(-1))
    assert np.array_equal(out, [(v >> 5) & 7, ((v >> 1) & 3) << 4, v & 128])


def assembly(features: frozenset[str], triple: str, llvm_features: str, seven: bool) -> str:
    """Return the machine code of one dot product for a processor that need not be this one."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    words, wide = ir.VectorType(ir.IntType(32), 16), ir.VectorType(ir.IntType(8), 64)
    module = ir.Module()
    module.triple = triple
    pointers = [ir.PointerType(t) for t in (words, wide, wide)]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), pointers), "dot")
    builder = ir.IRBuilder(function.append_basic_block())
    acc, u, s = (builder.load(p) for p in function.args)
    result = simd_int8.emit_dot(builder, acc, u, s, seven, features)
    builder.store(result, function.args[0])
    builder.ret_void()
    target = binding.Target.from_triple(triple)
    machine = target.create_target_machine(features=llvm_features, opt=2)
    return machine.emit_assembly(binding.parse_assembly(str(module)))


@pytest.mark.parametrize("seven", [False, True])
def test_arm_gets_its_dot_products(seven):
    arm = "aarch64-unknown-linux-gnu"
    text = assembly(frozenset({"aarch64", "dotprod"}), arm, "+dotprod", seven)
    assert text.count("sdot") == (4 if seven else 12)
    text = assembly(frozenset({"aarch64", "i8mm"}), arm, "+i8mm", seven)
    assert text.count("usdot") == 4
    assert "sdot" not in assembly(frozenset({"aarch64"}), arm, "", seven)


def test_x86_gets_its_dot_products():
    x86 = "x86_64-unknown-linux-gnu"
    text = assembly(X86[5], x86, "+avx512vnni,+avx512bw", False)
    assert text.count("vpdpbusd") == 1
    text = assembly(X86[3], x86, "+avx2,+avxvnni", False)
    assert text.count("vpdpbusd") == 2
    text = assembly(X86[2], x86, "+avx2", True)
    assert text.count("vpmaddubsw") == 2


def test_features_are_numbas():
    assert isa.parse("+avx2,-avx512f") == {"avx2"}
    assert isa.features() & {"x86", "aarch64", "other"}
