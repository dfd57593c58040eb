"""Parser: parsed programs and messages about wrong PTX."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from nbflow_ptx import Emulator, LaunchError, ParseError, UnsupportedInstruction, parse
from nbflow_ptx.parsing.syntax import Addr, Imm, Not, Reg, Special, Sym, Vec

TEXT = """
// a comment with { braces } and ;
.version 8.4
.target sm_80, debug
.address_size 64
.file 1 "source.cu"
.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
.global .align 4 .b8 words[6] = {1, 2, 0x3, 4, 5, 6};
.extern .shared .align 16 .b8 dynamic[];
.section .debug_str { $L: .b8 1, 2 }
.visible .entry kernel(
    .param .u64 .ptr .global .align 8 x,
    .param .align 4 .b8 s[12]
)
.maxntid 128, 1, 1
{
    .reg .b32 %r<3>; .reg .pred %p<2>; .reg .f32 %f;
    .loc 1 7 3
    /* a block
       comment */
    ld.param.u64 %r1, [x+4];
    {   // an inner scope with a register and a label of its own
        .reg .b32 %r1, temp;
        mov.u32 %r1, %tid.x;
        $again: @!%p1 bra $again;
    }
    .loc 1 0 0
    mov.b32 {%r1, _}, %r2;
    setp.eq.and.f32 %p1|%p0, %f, 0f3F800000, !%p1;
    st.shared.v2.u32 [dynamic+-8], {%r1, -5};
    ret;
}
"""


def test_parts() -> None:
    module = parse(TEXT)
    assert (module.version, module.target, module.files) == ("8.4", "sm_80", {1: "source.cu"})
    assert module.variables["words"].size == 6
    assert module.variables["dynamic"].size == 0
    kernel = module.functions["kernel"]
    assert kernel.max_threads == 128
    assert [(p.name, p.size, p.align) for p in kernel.params] == [("x", 8, 8), ("s", 12, 4)]
    load, move, branch, unpack, compare, store, _ = kernel.code
    assert load.args[1] == Addr(Sym("x"), 4)
    assert (load.line, load.source) == (21, (1, 7))
    assert move.args == (Reg("%r1@1"), Special("%tid.x"))
    assert branch.guard == (Reg("%p1"), True)
    assert unpack.source == (1, 7)  # line 0 says nothing
    assert isinstance(unpack.args[0], Vec)
    assert compare.args[2:] == (Imm(0x3F800000, 4), Not(Reg("%p1")))
    assert store.args[0] == Addr(Sym("dynamic"), -8)
    assert store.has("v2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("mov.u32 %r1, %tid.x;", "mov.u32 %r1, ?;"), r"line 24: not an operand: '\?'"),
        (("bra $again", "bra $nowhere"), r"line 25: no label \$nowhere"),
        (("@!%p1 bra", "@!%p9 bra"), "line 25: undeclared predicate %p9"),
        (("[x+4]", "[x*4]"), r"line 21: not an operand: 'x\*4'"),
        ((".reg .b32 %r1, temp", ".reg .q32 %r1, temp"), r"line 23: unknown register type .q32"),
        (("    ret;\n}", "    ret;\n"), "no closing brace"),
        (
            (".visible .entry kernel", ".visible .elephant kernel"),
            "no directive, function or variable",
        ),
    ],
)
def test_errors_name_the_line(change: tuple[str, str], message: str) -> None:
    assert change[0] in TEXT
    with pytest.raises(ParseError, match=message):
        parse(TEXT.replace(*change))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        ".version 8.0\n",
        "\x7fELF....",
        "." * 100,
        "{" * 100,
        ".entry",
        ".visible .entry k(",
    ],
)
def test_not_ptx(text: str) -> None:
    with pytest.raises(ParseError):
        parse(text)


def test_broken_texts_never_raise_anything_else() -> None:
    """Cut anywhere or with a character changed, a text parses or is a ParseError."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        k = int(rng.integers(len(TEXT)))
        for broken in (TEXT[:k], TEXT[:k] + chr(int(rng.integers(32, 127))) + TEXT[k + 1 :]):
            with contextlib.suppress(ParseError):
                parse(broken)


CALLS = """.version 8.4
.target sm_80
.address_size 64
.func (.param .b32 result) square(.param .b32 v)
{ .reg .b32 %r<3>; ld.param.u32 %r1, [v]; mul.lo.u32 %r1, %r1, %r1; st.param.b32 [result], %r1;
ret; }
.func (.param .b32 result) early(.param .b32 v)
{ .reg .b32 %r<3>; .reg .pred %p; ld.param.u32 %r1, [v]; setp.lt.u32 %p, %r1, 5; @%p bra $small;
  .param .b32 p0; .param .b32 r0; st.param.b32 [p0], %r1; call.uni (r0), square, (p0);
  ld.param.b32 %r2, [r0];
  st.param.b32 [result], %r2; ret;
  $small: st.param.b32 [result], 1000; ret; }
.visible .entry k(.param .u64 x)
{ .reg .b32 %r<5>; .reg .b64 %a<3>; ld.param.u64 %a1, [x]; mov.u32 %r1, %tid.x;
mad.wide.u32 %a2, %r1, 4, %a1;
  { .param .b32 param0; st.param.b32 [param0+0], %r1; .param .b32 retval0;
    call.uni (retval0), early, (param0); ld.param.b32 %r2, [retval0+0]; }
  { .param .b32 param0; st.param.b32 [param0+0], %r2; .param .b32 retval0;
    call.uni (retval0), square, (param0); ld.param.b32 %r2, [retval0+0]; }
  st.global.u32 [%a2], %r2; ret; }
"""


def test_device_functions_are_inlined() -> None:
    """Divergent early returns, nested calls and two calls of one function."""
    x = np.zeros(32, np.uint32)
    Emulator(CALLS).launch("k", 1, 32, x)
    assert x.tolist() == [(1000 if t < 5 else t * t) ** 2 for t in range(32)]


def test_recursion_and_unknown_functions_are_refused() -> None:
    recursive = CALLS.replace("call.uni (r0), square, (p0)", "call.uni (r0), early, (p0)")
    with pytest.raises(UnsupportedInstruction, match="recursive device function early"):
        Emulator(recursive).launch("k", 1, 32, np.zeros(32, np.uint32))
    missing = CALLS.replace("call.uni (r0), square, (p0)", "call.uni (r0), malloc, (p0)")
    with pytest.raises(
        UnsupportedInstruction, match="call of malloc, whose code is not in this module"
    ):
        Emulator(missing).launch("k", 1, 32, np.zeros(32, np.uint32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("j", 1, 32), r"unknown kernel 'j'.*available: k"),
        (("k", 1, 32), "takes 1 arguments, got 0"),
        (("k", 0, 32, np.zeros(1)), "grid.x must be 1 to 2147483647, got 0"),
        (("k", 1, 1025, np.zeros(1)), "block.x must be 1 to 1024, got 1025"),
        (("k", 1, (64, 32), np.zeros(1)), "a thread block of 2048"),
        (("k", 1, 32, "text"), "must be an array, a number or bytes, got str"),
        (("k", 1, 32, 1.5), "argument 0 is a float, the parameter an integer of 8 bytes"),
    ],
)
def test_wrong_launches(arguments: tuple[object, ...], message: str) -> None:
    name, grid, block, *rest = arguments
    with pytest.raises(LaunchError, match=message):
        Emulator(CALLS).launch(name, grid, block, *rest)  # type: ignore[arg-type]


def test_grid_barrier_of_numba() -> None:
    """``cg.this_grid().sync()`` calls these two functions; all blocks must run at once."""
    text = """.version 8.4
    .target sm_80
    .address_size 64
    .extern .func (.param .b32 func_retval0) cudaCGSynchronize (.param .b64 p0, .param .b32 p1);
    .extern .func (.param .b64 func_retval0) cudaCGGetIntrinsicHandle (.param .b32 p0);
    .visible .entry k(.param .u64 x, .param .u64 y) { .reg .b32 %r<6>; .reg .b64 %a<5>;
    ld.param.u64 %a0, [x]; ld.param.u64 %a1, [y]; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x; mad.lo.u32 %r3, %r1, %r2, %r0;
    mad.wide.u32 %a2, %r3, 4, %a0; st.global.u32 [%a2], %r3;
    { .param .b32 param0; st.param.b32 [param0+0], 1; .param .b64 retval0;
    call.uni (retval0), cudaCGGetIntrinsicHandle, (param0); ld.param.b64 %a3, [retval0+0]; }
    { .param .b64 param0; st.param.b64 [param0+0], %a3; .param .b32 param1;
    st.param.b32 [param1+0], 0; .param .b32 retval0;
      call.uni (retval0), cudaCGSynchronize, (param0, param1); ld.param.b32 %r4, [retval0+0]; }
    sub.u32 %r5, 1023, %r3; mad.wide.u32 %a2, %r5, 4, %a0; ld.global.u32 %r5, [%a2];
    mad.wide.u32 %a2, %r3, 4, %a1; st.global.u32 [%a2], %r5; ret; }"""
    x, y = np.zeros(1024, np.uint32), np.zeros(1024, np.uint32)
    Emulator(text).launch("k", 32, 32, x, y)
    assert y.tolist() == list(range(1023, -1, -1))
    from nbflow_ptx import KernelFault

    without = text.replace(
        "call.uni (retval0), cudaCGSynchronize, (param0, param1);", "st.param.b32 [retval0], 0;"
    )
    with pytest.raises(KernelFault) as e:
        Emulator(without).launch("k", 32, 32, x, y)
    assert e.value.finding.check == "race"


def test_a_text_without_the_other_kernels() -> None:
    two = TEXT + TEXT[TEXT.index(".visible .entry") :].replace("entry kernel(", "entry other(")
    assert parse(two).entries == ["kernel", "other"]
    for name, text in (("kernel", TEXT), ("other", two)):
        module = parse(two, name)
        assert module.entries == [name]
        assert module.functions[name] == parse(text).functions[name]
    with pytest.raises(ParseError, match="line 38: a function without a closing brace"):
        parse(two[:-2], "kernel")
