"""Static facts, the table, and the command line."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from nbflow_ptx import ParseError, lint
from nbflow_ptx.__main__ import main
from nbflow_ptx.lint import find_ptxas

PTX = Path(__file__).parent / "kernels" / "planted.ptx"


def test_counts() -> None:
    report = lint(PTX.read_text())
    assert report["aligned_ok"].global_loads == {16: 1}
    assert report["aligned_ok"].wide_loads == 1
    assert report["aligned_ok"].global_stores == {4: 1}
    assert report["race_async_ok"].async_copies == 1
    assert report["race_async_ok"].static_shared_bytes == 512
    assert report["race_war_ok"].barriers == 4  # two rounds, unrolled
    assert report["race_blocks_ok"].atomics == 1
    assert report["uninitialised_local"].local_bytes == 32
    assert (report["uninitialised_local"].local_accesses or 0) >= 8
    assert all(k.fp64 == 0 for k in report.kernels)
    assert "bounds_ok" in str(report)


def test_tensor_core_and_fp64() -> None:
    text = """.version 8.0
    .target sm_80
    .address_size 64
    .visible .entry k(.param .u64 x) { .reg .b32 %r<10>; .reg .f64 %d<3>; .reg .b64 %a;
    ld.param.u64 %a, [x]; ld.global.f64 %d1, [%a]; fma.rn.f64 %d2, %d1, %d1, %d1;
    st.global.f64 [%a], %d2;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r0, %r1, %r2, %r3},
     {%r4, %r5, %r6, %r7}, {%r8, %r9}, {%r0, %r1, %r2, %r3};
    ret; }"""
    facts = lint(text)["k"]
    assert (facts.fp64, facts.tensor_core) == (1, 1)
    assert facts.registers is not None or facts.registers_from.startswith("unknown: ")


def test_registers_or_the_reason_there_are_none() -> None:
    facts = lint(PTX.read_text(), "sm_80")["banks"]
    if find_ptxas() is None:
        assert facts.registers is None
        assert "ptxas is not installed" in facts.registers_from
    else:
        assert 0 < (facts.registers or 0) < 64
        assert facts.spill_loads == 0


def cubin(name: str, registers: int, shared: int, *, in_info: bool) -> bytes:
    """Return the smallest file with the headers of a cubin; `registers` are in its attributes."""
    # an attribute of four bytes, one of eight for another symbol, and ours
    info = struct.pack("<BBHBBHIIBBHII", 3, 0x1B, 7, 4, 0x2F, 8, 9, 77, 4, 0x2F, 8, 5, registers)
    titles = (".shstrtab", f".text.{name}", f".nv.shared.{name}", ".nv.info")
    strings = b"".join(b"\0" + title.encode() for title in titles) + b"\0" + info
    at = {title: strings.index(title.encode()) for title in titles}
    rows = [
        (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        (at[".shstrtab"], 3, 0, 0, 64, len(strings), 0, 0, 1, 0),
        (at[f".text.{name}"], 1, 0, 0, 64, 0, 0, 5 if in_info else registers << 24 | 6, 1, 0),
        (at[f".nv.shared.{name}"], 8, 0, 0, 64, shared, 0, 0, 1, 0),
        (at[".nv.info"], 0x70000000, 0, 0, 64 + len(strings) - len(info), len(info), 0, 0, 1, 0),
    ]
    header = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack(
            "<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(strings), 0, 64, 0, 0, 64, len(rows), 1
        )
    )
    return header + strings + b"".join(struct.pack("<IIQQQQIIQQ", *r) for r in rows)


@pytest.mark.parametrize("in_info", [True, False])
def test_cubin_headers(in_info: bool) -> None:
    facts = lint(cubin("scale", 40, 512, in_info=in_info))["scale"]
    assert (facts.registers, facts.static_shared_bytes, facts.instructions) == (40, 512, None)


def test_broken_cubins() -> None:
    data = cubin("scale", 40, 512, in_info=True)
    for wrong in (
        data[:60],
        data[:100],
        data[:18] + b"\x3e\x00" + data[20:],
        data[:58] + b"\xff\xff\xff\xff\xff\xff" + data[64:],
    ):
        with pytest.raises(ParseError):
            lint(wrong)


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(PTX), "--lint"]) == 0
    assert "global loads: bytes x count" in capsys.readouterr().out
    assert main([str(PTX), "--json"]) == 0
    names = [k["name"] for k in json.loads(capsys.readouterr().out)["kernels"]]
    assert "banks_ok" in names
    assert main([str(PTX)]) == 0
    assert "instructions, all supported" in capsys.readouterr().out
    unsupported = tmp_path / "new.ptx"
    unsupported.write_text(
        ".version 8.6\n.target sm_100a\n.visible .entry k() { tcgen05.wait::ld.sync.aligned; ret; }"
    )
    assert main([str(unsupported)]) == 1
    assert "unknown instruction 'tcgen05'" in capsys.readouterr().out
    assert main([str(tmp_path / "missing.ptx")]) == 2
    (tmp_path / "text.ptx").write_text("hello")
    assert main([str(tmp_path / "text.ptx"), "--lint"]) == 2
