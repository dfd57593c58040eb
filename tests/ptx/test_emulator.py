"""Arguments, results, repeated launches, and what the package needs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from nbflow_ptx import Checks, Device, Emulator, LaunchError

HEAD = ".version 8.4\n.target sm_80\n.address_size 64\n"
SCALARS = f"""{HEAD}.visible .entry k(.param .u64 y, .param .u32 a, .param .f32 b,
 .param .f64 c, .param .u8 d, .param .u64 e,
 .param .align 8 .b8 s[16])
{{ .reg .b64 %y, %x<4>; .reg .b32 %r<4>; .reg .b16 %h;
ld.param.u64 %y, [y]; ld.param.u32 %r0, [a]; ld.param.f32 %r1, [b]; ld.param.f64 %x0, [c];
ld.param.u8 %h, [d]; ld.param.u64 %x1, [e];
ld.param.v2.u64 {{%x2, %x3}}, [s]; st.global.u32 [%y], %r0; st.global.u32 [%y+4], %r1;
st.global.u64 [%y+8], %x0; st.global.u8 [%y+16], %h;
st.global.u64 [%y+24], %x1; st.global.v2.u64 [%y+32], {{%x2, %x3}}; ret; }}"""


def test_scalar_arguments() -> None:
    y = np.zeros(6, np.uint64)
    Emulator(SCALARS).launch(
        "k", 1, 1, y, -2, 1.5, np.float64(2.5), np.uint8(200), np.int64(-1), bytes(range(16))
    )
    raw = y.tobytes()
    assert np.frombuffer(raw, np.int32, 1)[0] == -2
    assert np.frombuffer(raw, np.float32, 1, 4)[0] == 1.5
    assert np.frombuffer(raw, np.float64, 1, 8)[0] == 2.5
    assert raw[16] == 200
    assert np.frombuffer(raw, np.int64, 1, 24)[0] == -1
    assert raw[32:] == bytes(range(16))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, 2**32, "argument 1 = 4294967296 does not fit a parameter of 4 bytes"),
        (1, 1.5, "argument 1 is a float, the parameter an integer of 4 bytes"),
        (6, b"123", "argument 6 has 3 bytes, the parameter 16"),
        (1, np.zeros(4), "argument 1 is an array, but the parameter has 4 bytes"),
    ],
)
def test_wrong_arguments(place: int, value: object, message: str) -> None:
    args: list[object] = [np.zeros(6, np.uint64), 1, 1.0, 1.0, 1, 1, bytes(16)]
    args[place] = value
    with pytest.raises(LaunchError, match=message):
        Emulator(SCALARS).launch("k", 1, 1, *args)


SUM = f"""{HEAD}.visible .entry add(.param .u64 x, .param .u64 y)
{{ .reg .b64 %x, %y, %a; .reg .b32 %t, %n, %c; .reg .f32 %f<3>; ld.param.u64 %x, [x];
ld.param.u64 %y, [y];
mov.u32 %t, %tid.x; mov.u32 %n, %ntid.x; mov.u32 %c, %ctaid.x; mad.lo.u32 %t, %c, %n, %t;
mad.wide.u32 %a, %t, 4, %x; ld.global.f32 %f0, [%a];
mad.wide.u32 %a, %t, 4, %y; ld.global.f32 %f1, [%a]; add.f32 %f0, %f0, %f1;
st.global.f32 [%a], %f0; ret; }}"""


def test_one_array_as_two_arguments_is_one_memory() -> None:
    x = np.ones(64, np.float32)
    Emulator(SUM).launch("add", 2, 32, x, x)
    assert x.tolist() == [2] * 64


def test_overlapping_arrays_are_refused() -> None:
    x = np.ones(65, np.float32)
    with pytest.raises(LaunchError, match="argument 1 overlaps argument 0 in part"):
        Emulator(SUM).launch("add", 2, 32, x[:64], x[1:])


def test_read_only_and_strided_arrays() -> None:
    """A read-only array is not written back; a strided one is copied in C order and back."""
    x, base = np.ones(64, np.float32), np.zeros(128, np.float32)
    x.flags.writeable = False
    Emulator(SUM).launch("add", 2, 32, x, base[::2])
    assert base.tolist() == [1, 0] * 64


def test_device_arrays_outlive_launches() -> None:
    device = Device(1 << 16)
    x, y = (
        device.copy_in(np.ones(64, np.float32), "x"),
        device.copy_in(np.zeros(64, np.float32), "y"),
    )
    emulator = Emulator(SUM, device=device)
    for _ in range(300):  # what a launch itself takes is given back
        emulator.launch("add", 2, 32, x, y)
    assert (device.bytes_of(y).view(np.float32) == 300).all()
    with pytest.raises(LaunchError, match="more do not fit"):
        device.allocate(1 << 20)


def test_many_blocks_in_groups() -> None:
    """More threads than run together: blocks run group after group."""
    n = 256 * 200
    x, y = np.arange(n, dtype=np.float32), np.ones(n, np.float32)
    result = Emulator(SUM).launch("add", 200, 256, x, y)
    np.testing.assert_array_equal(y, x + 1)
    assert result.thread_instructions == 13 * n


def test_checks_change_nothing_but_reports() -> None:
    x, y = np.arange(64, dtype=np.float32), np.ones(64, np.float32)
    Emulator(SUM, checks=Checks(races=False, uninitialised=False)).launch("add", 2, 32, x, y)
    np.testing.assert_array_equal(y, x + 1)


def test_imports_numpy_alone() -> None:
    """Neither numba, nor CUDA, nor the rest of the project."""
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"  # installed packages may import themselves at the start
        "import nbflow_ptx, nbflow_ptx.cupy_stand_in, nbflow_ptx.__main__\n"
        "bad = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "bad &= {'numba', 'cuda', 'cupy', 'nbflow', 'nbflow_kernels', 'llvmlite'}\n"
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
