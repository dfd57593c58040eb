"""Facts about a kernel that a test can assert on, without running it.

From the PTX text: instructions by kind, widths of global accesses, barriers, static shared and
local bytes.  From ``ptxas``, where it is installed, or from a cubin: registers, spills and stack.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nbflow_ptx.errors import ParseError
from nbflow_ptx.parsing.linker import link
from nbflow_ptx.parsing.parser import parse
from nbflow_ptx.parsing.syntax import Instruction, Module, Vec
from nbflow_ptx.threads.launch_layout import short_name

_TENSOR = ("mma", "wmma", "wgmma", "ldmatrix", "stmatrix", "tcgen05")
_ELF_MACHINE_CUDA = 190
_REGISTER_COUNT = 0x2F  # EIATTR_REGCOUNT: the kernel's symbol, and its registers
_SIZED = 4  # the format of an attribute whose size is stated; others have four bytes


@dataclass
class KernelFacts:
    """Static facts about one kernel.

    Counts are static: instructions in the text, device functions included where they are called.
    None means that the input does not contain it (a cubin has no PTX instructions; registers need
    ``ptxas``); `registers_from` says where the number comes from, or why there is none.
    """

    name: str
    instructions: int | None = None
    fp64: int | None = None
    local_accesses: int | None = None
    local_bytes: int | None = None
    static_shared_bytes: int | None = None
    global_loads: dict[int, int] | None = None
    global_stores: dict[int, int] | None = None
    barriers: int | None = None
    atomics: int | None = None
    tensor_core: int | None = None
    async_copies: int | None = None
    calls: int | None = None
    registers: int | None = None
    registers_from: str = ""
    spill_stores: int | None = None
    spill_loads: int | None = None
    stack_bytes: int | None = None

    @property
    def wide_loads(self) -> int:
        """Global loads of 16 bytes per thread."""
        return (self.global_loads or {}).get(16, 0)


@dataclass
class LintReport:
    """The facts of every kernel of a module; ``report["name"]`` gives one."""

    arch: str
    kernels: list[KernelFacts]

    def __getitem__(self, name: str) -> KernelFacts:
        found = [k for k in self.kernels if k.name == name] or [
            k for k in self.kernels if name in k.name
        ]
        if len(found) != 1:
            raise KeyError(f"{name!r}: {[k.name for k in found] or [k.name for k in self.kernels]}")
        return found[0]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", *(short_name(k.name) for k in self.kernels))]
        for label, attribute in _ROWS:
            rows.append((label, *(_cell(getattr(k, attribute)) for k in self.kernels)))
        widths = [max(len(r[j]) for r in rows) for j in range(len(rows[0]))]
        lines = [
            "  ".join(
                c.ljust(w) if j == 0 else c.rjust(w)
                for j, (c, w) in enumerate(zip(r, widths, strict=True))
            ).rstrip()
            for r in rows
        ]
        reasons = sorted({k.registers_from for k in self.kernels})
        return "\n".join(
            [f"compiled for {self.arch}", *lines, *(f"registers: {r}" for r in reasons)]
        )


_ROWS = (
    ("instructions", "instructions"), ("fp64 instructions", "fp64"),
    ("local accesses", "local_accesses"), ("local bytes per thread", "local_bytes"),
    ("static shared bytes", "static_shared_bytes"), ("global loads: bytes x count", "global_loads"),
    ("global stores: bytes x count", "global_stores"), ("barriers", "barriers"),
    ("atomics", "atomics"), ("tensor-core instructions", "tensor_core"),
    ("asynchronous copies", "async_copies"), ("calls", "calls"), ("registers", "registers"),
    ("spill stores, bytes", "spill_stores"), ("spill loads, bytes", "spill_loads"),
    ("stack, bytes", "stack_bytes"),
)  # fmt: skip


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{w} x {n}" for w, n in sorted(value.items(), reverse=True)) or "none"
    return "?" if value is None else str(value)


def lint(code: str | bytes | Module, arch: str | None = None) -> LintReport:
    """Report static facts about the kernels of a PTX text or a cubin.

    Parameters
    ----------
    code : str, bytes or Module
        PTX, or the bytes of a cubin (an ELF file).
    arch : str, optional
        ``sm_90`` and the like, for ``ptxas``; default: the target named in the PTX.

    Returns
    -------
    LintReport

    Raises
    ------
    ParseError
        If the code is neither.

    Examples
    --------
    >>> from nbflow_ptx import lint
    >>> report = lint('''
    ... .version 8.0
    ... .target sm_80
    ... .visible .entry k(.param .u64 x)
    ... {
    ...     .reg .f64 %fd<2>; .reg .b64 %rd<2>;
    ...     ld.param.u64 %rd1, [x];
    ...     ld.global.f64 %fd1, [%rd1];
    ...     add.f64 %fd1, %fd1, %fd1;
    ...     st.global.f64 [%rd1], %fd1;
    ...     ret;
    ... }''')
    >>> report["k"].fp64, report["k"].global_loads
    (1, {8: 1})
    """
    if isinstance(code, bytes) and code[:4] == b"\x7fELF":
        return LintReport(arch or "cubin", _cubin_facts(code))
    text = code if not isinstance(code, Module) else None
    module = parse(code) if not isinstance(code, Module) else code
    arch = arch or module.target or "sm_80"
    kernels = [_facts(module, name) for name in module.entries]
    _registers(kernels, text, arch)
    return LintReport(arch, kernels)


def _facts(module: Module, name: str) -> KernelFacts:
    kernel = link(module, name)
    facts = KernelFacts(name, len(kernel.code))
    code = kernel.code

    def count(test: Callable[[Instruction], bool]) -> int:
        return sum(1 for ins in code if test(ins))

    facts.fp64 = count(_is_fp64)
    facts.local_accesses = count(lambda i: i.opcode in ("ld", "st") and i.space == "local")
    local = [v for v in kernel.frame if _is_array(v)]
    facts.local_bytes = sum(kernel.frame_sizes[v] for v in local)
    used = {getattr(a, "name", "") for i in code for a in _flat(i)}
    facts.static_shared_bytes = sum(v.size for v in kernel.shared if v.name in used)
    facts.barriers = count(lambda i: i.opcode in ("bar", "barrier") and not i.has("warp", "arrive"))
    facts.atomics = count(lambda i: i.opcode in ("atom", "red"))
    facts.tensor_core = count(lambda i: i.opcode in _TENSOR)
    facts.async_copies = count(
        lambda i: i.opcode == "cp" and not i.has("commit_group", "wait_group", "wait_all")
    )
    facts.calls = count(lambda i: i.opcode == "call")
    loads: dict[int, int] = {}
    stores: dict[int, int] = {}
    facts.global_loads, facts.global_stores = loads, stores
    for ins in code:
        if ins.opcode in ("ld", "ldu", "st") and ins.space in ("global", "generic"):
            table = stores if ins.opcode == "st" else loads
            width = access_bytes(ins)
            table[width] = table.get(width, 0) + 1
    return facts


def access_bytes(ins: Instruction) -> int:
    """Return the bytes one thread moves in a load or store."""
    kind = ins.types[-1]
    vector = next((a for a in ins.args if isinstance(a, Vec)), None)
    return max(kind.nbytes, 1) * (len(vector.items) if vector else 1)


def _flat(ins: Instruction) -> list[object]:
    return [getattr(a, "base", a) for a in ins.args]


def _is_array(name: str) -> bool:
    """Return whether a thread's own variable is memory (not an argument of a call)."""
    return not re.search(r"(^|:)(param\d+|retval\d+|temp_param\w*)(@\d+)?$", name)


def _is_fp64(ins: Instruction) -> bool:
    """Return whether an instruction computes with float64 (moves of 8 bytes do not)."""
    return "f64" in ins.op and ins.opcode not in ("ld", "st", "mov", "selp", "ldu")


# Registers -------------------------------------------------------------------------------------


def find_ptxas() -> str | None:
    """Return the path of ``ptxas``: on the path, in CUDA_HOME, or of an installed wheel."""
    if found := shutil.which("ptxas"):
        return found
    roots = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    try:
        import nvidia

        roots += [d for p in nvidia.__path__ for d in sorted(Path(p).iterdir())]
    except ImportError:
        pass
    for root in roots:
        if (root / "bin" / "ptxas").is_file():
            return str(root / "bin" / "ptxas")
    return None


def _registers(kernels: list[KernelFacts], text: str | bytes | None, arch: str) -> None:
    """Fill in registers and spills from ``ptxas``, or say why they are unknown."""
    ptxas = find_ptxas()
    if ptxas is None or text is None:
        why = "unknown: ptxas is not installed (pip install -e '.[cuda-test]')"
        for k in kernels:
            k.registers_from = why if text is not None else "unknown: no PTX text given"
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_bytes(text if isinstance(text, bytes) else text.encode())
        done = subprocess.run(
            [ptxas, "-v", f"-arch={arch}", str(source), "-o", str(Path(folder, "kernel.cubin"))],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        message = done.stderr.strip().splitlines()
        for k in kernels:
            k.registers_from = (
                f"unknown: ptxas failed: {message[0] if message else done.returncode}"
            )
        return
    _read_ptxas(kernels, done.stderr)


def _read_ptxas(kernels: list[KernelFacts], log: str) -> None:
    by_name = {k.name: k for k in kernels}
    current: KernelFacts | None = None
    for line in log.splitlines():
        if m := re.search(r"(?:Compiling entry function|Function properties for) '?([\w$]+)", line):
            current = by_name.get(m.group(1))
        if current is None:
            continue
        if m := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            current.stack_bytes, current.spill_stores, current.spill_loads = map(int, m.groups())
        if m := re.search(r"Used (\d+) registers", line):
            current.registers, current.registers_from = int(m.group(1)), "counted by ptxas"


def _register_counts(attributes: bytes) -> dict[int, int]:
    """Return the registers of each kernel, by the number of its symbol."""
    found, at = {}, 0
    while at + 4 <= len(attributes):
        form, what, size = struct.unpack_from("<BBH", attributes, at)
        at += 4
        if form != _SIZED:
            continue
        if what == _REGISTER_COUNT and size == 8 and at + 8 <= len(attributes):
            symbol, count = struct.unpack_from("<II", attributes, at)
            found[symbol] = count
        at += size
    return found


def _cubin_facts(data: bytes) -> list[KernelFacts]:
    """Read the section headers of a cubin: registers, shared and stack bytes of each kernel."""
    if len(data) < 64 or data[4] != 2:
        raise ParseError("not a 64-bit ELF file")
    machine = struct.unpack_from("<H", data, 18)[0]
    if machine != _ELF_MACHINE_CUDA:
        raise ParseError(f"an ELF file of machine {machine}; a cubin has {_ELF_MACHINE_CUDA}")
    offset = struct.unpack_from("<Q", data, 40)[0]
    size, count, names = struct.unpack_from("<HHH", data, 58)
    if size < 64 or offset + size * count > len(data) or names >= count:
        raise ParseError("a cubin whose section table lies outside the file")
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + k * size) for k in range(count)]
    table = sections[names]
    strings = data[table[4] : table[4] + table[5]]

    def label(at: int) -> str:
        end = strings.find(b"\0", at)
        return strings[at : end if end >= 0 else at].decode("utf-8", "replace")

    info = next((s for s in sections if label(s[0]) == ".nv.info"), None)
    registers = {} if info is None else _register_counts(data[info[4] : info[4] + info[5]])
    kernels: dict[str, KernelFacts] = {}
    shared: dict[str, int] = {}
    for s in sections:
        title = label(s[0])
        if title.startswith(".text."):
            symbol, count = s[7] & 0xFFFFFF, s[7] >> 24  # the count is there up to sm_80 alone
            facts = KernelFacts(title[6:], registers=registers.get(symbol, count) or None)
            facts.registers_from = "stated by the cubin" if facts.registers else "not in the cubin"
            kernels[facts.name] = facts
        elif title.startswith(".nv.shared."):
            shared[title[11:]] = s[5]
    for name, facts in kernels.items():
        facts.static_shared_bytes = shared.get(name, 0)
    return list(kernels.values())
