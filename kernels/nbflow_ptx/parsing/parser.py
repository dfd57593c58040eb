"""PTX text to a `Module`.

A text is a sequence of directives, variable declarations and functions; a body is a sequence of
labels, scopes, declarations and instructions.  Comments are blanked first, so that positions (and
with them line numbers) stay those of the text.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from dataclasses import replace

from nbflow_ptx.errors import ParseError
from nbflow_ptx.parsing.syntax import (
    Addr,
    Function,
    Imm,
    Instruction,
    Module,
    Not,
    Operand,
    Pair,
    Reg,
    Skip,
    Special,
    Sym,
    Variable,
    Vec,
)
from nbflow_ptx.parsing.types import TYPES

_NAME = r"[A-Za-z_$%][\w$]*"
_SPACE = re.compile(r"\s*")
_BRACE = re.compile(r"[{}]")
_COMMA = re.compile(r",(?![^\[]*\])")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_DIRECTIVE = re.compile(
    r"\.(version|target|address_size|file|loc|section|pragma|alias)\b([^\n;{]*)"
)
_FUNCTION = re.compile(r"((?:\.(?:visible|extern|weak|common)\s+)*)\.(entry|func)\b")
_SOURCE_LINE = re.compile(r"\s*(\d+)\s+(\d+)")
_LABEL = re.compile(rf"({_NAME})\s*:(?!:)")
_GUARD = re.compile(rf"@(!?)\s*({_NAME})\s+(.*)", re.S)
_OPCODE = re.compile(r"([a-z][\w.:]*)\s*(.*)", re.S)
_VARIABLE = re.compile(
    r"(?P<link>(?:\.(?:visible|extern|weak|common)\s+)*)\.(?P<space>global|const|shared|local|param)\b"
    r"(?P<mods>(?:\s*\.(?:align\s+\d+|ptr|global|const|shared|local|attribute\([^)]*\)))*)"
    r"\s*(?:\.(?P<vec>v[248])\s*)?\.(?P<type>\w+)(?P<mods2>(?:\s*\.(?:align\s+\d+|ptr|global|const|shared|local))*)"
    rf"\s+(?P<name>{_NAME})\s*(?P<dims>(?:\[\s*\d*\s*\]\s*)*)(?:=\s*(?P<init>.*))?",
    re.S,
)
_REGISTERS = re.compile(r"\.reg\s*(?:\.v[24]\s*)?\.(\w+)\s+(.*)", re.S)
_NUMBER = re.compile(
    r"-?(?:0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+|0[bB][01]+|\d+\.\d*(?:[eE][-+]?\d+)?|\d+)U?$"
)
_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)(\.[xyz])?$"
    r"|%(laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock_hi|clock64|globaltimer|globaltimer_lo"
    r"|globaltimer_hi|lanemask_(eq|le|lt|ge|gt)|envreg\d+|dynamic_smem_size|total_smem_size"
    r"|cluster_ctarank|cluster_nctarank|is_explicit_cluster|pm\d+)$|WARP_SZ$"
)
#: The text of a kernel is some hundred kilobytes; refuse what cannot be one.
MAX_CHARS = 64 << 20


def parse(text: str | bytes, entry: str = "") -> Module:
    """Parse a PTX text.

    Parameters
    ----------
    text : str or bytes
        What ``numba.cuda.compile_ptx``, NVRTC or ``nvcc -ptx`` wrote.
    entry : str
        Leave out kernels whose name does not contain this: a text may hold dozens.

    Returns
    -------
    Module
        Functions, variables and files by name.

    Raises
    ------
    ParseError
        With the line number, if the text is not PTX or not supported.

    Examples
    --------
    >>> from nbflow_ptx.parsing.parser import parse
    >>> module = parse('''
    ... .version 8.0
    ... .target sm_80
    ... .visible .entry nothing(.param .u32 n) { ret; }
    ... ''')
    >>> module.entries
    ['nothing']
    """
    if isinstance(text, bytes):
        text = text.rstrip(b"\0").decode("utf-8", "replace")
    if len(text) > MAX_CHARS:
        raise ParseError(f"a PTX text of {len(text)} characters; at most {MAX_CHARS} are read")
    parser = _Parser(text, entry)
    try:
        return parser.module()
    except (IndexError, ValueError) as e:
        if isinstance(e, ParseError):
            raise
        raise ParseError(f"PTX line {parser.line(parser.latest)}: cannot be read: {e}") from e


class _Parser:
    def __init__(self, text: str, entry: str) -> None:
        self.entry = entry
        self.text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
        self.starts = [0] + [m.end() for m in re.finditer("\n", text)]
        self.out = Module()
        self.latest = 0  # where the latest statement begins

    def line(self, pos: int) -> int:
        return bisect_right(self.starts, pos)

    def fail(self, pos: int, why: str) -> ParseError:
        return ParseError(f"PTX line {self.line(pos)}: {why}")

    def skip_space(self, pos: int) -> int:
        found = _SPACE.match(self.text, pos)
        return found.end() if found else pos

    def find(self, what: str, pos: int) -> int:
        end = self.text.find(what, pos)
        if end < 0:
            raise self.fail(pos, f"{what!r} is missing after this")
        return end

    def module(self) -> Module:
        pos, text = self.skip_space(0), self.text
        while pos < len(text):
            self.latest = pos
            if m := _DIRECTIVE.match(text, pos):
                pos = self.directive(m)
            elif m := _FUNCTION.match(text, pos):
                pos = self.function(m)
            else:
                end = self.find(";", pos)
                v = parse_variable(text[pos:end])
                if v is None:
                    raise self.fail(
                        pos,
                        f"no directive, function or variable: {_short(text[pos:end])!r}",
                    )
                self.out.variables[v.name] = v
                pos = end + 1
            pos = self.skip_space(pos)
        if not self.out.functions and not self.out.variables:
            raise ParseError("the text holds no function and no variable: it is not PTX")
        return self.out

    def directive(self, m: re.Match[str]) -> int:
        kind, rest = m.group(1), m.group(2).strip()
        if kind == "version":
            self.out.version = rest
        elif kind == "target":
            self.out.target = rest.split(",")[0].strip()
        elif kind == "file" and (f := re.match(r'(\d+)\s+"([^"]*)"', rest)):
            self.out.files[int(f.group(1))] = f.group(2)
        elif kind == "section":
            return self.find("}", m.end()) + 1
        elif kind in ("pragma", "alias"):
            return self.find(";", m.end()) + 1
        return m.end()

    def function(self, m: re.Match[str]) -> int:
        text, pos = self.text, m.end()
        returns: list[Variable] = []
        pos = self.skip_space(pos)
        if text.startswith("(", pos):
            returns, pos = self.parameters(pos)
        name = re.compile(rf"\s*({_NAME})").match(text, pos)
        if name is None:
            raise self.fail(pos, "a function without a name")
        pos = self.skip_space(name.end())
        params: list[Variable] = []
        if pos < len(text) and text[pos] == "(":
            params, pos = self.parameters(pos)
        body = re.compile(r"[^{;]*([{;])").match(text, pos)
        if body is None:
            raise self.fail(pos, f"function {name.group(1)} has neither a body nor a semicolon")
        if body.group(1) == ";":
            return body.end()
        f = Function(name.group(1), m.group(2) == "entry", params, returns)
        if t := re.search(r"\.(?:max|req)ntid\s+([\d,\s]+)", body.group()):
            f.max_threads = 1
            for n in re.findall(r"\d+", t.group(1)):
                f.max_threads *= int(n)
        if t := re.search(r"\.reqnctapercluster\s+([\d,\s]+)", body.group()):
            f.cluster = tuple(int(n) for n in re.findall(r"\d+", t.group(1)))
        if f.entry and self.entry not in f.name:
            return self.skip_body(body.end())
        end = _Body(self, f).read(body.end())
        self.out.functions[f.name] = f
        return end

    def skip_body(self, pos: int) -> int:
        """Return the end of the body that begins at `pos`, behind its brace."""
        depth = 1
        for m in _BRACE.finditer(self.text, pos):
            depth += 1 if m.group() == "{" else -1
            if not depth:
                return m.end()
        raise self.fail(pos, "a function without a closing brace")

    def parameters(self, pos: int) -> tuple[list[Variable], int]:
        """Read ``( .param ..., ... )`` starting at the parenthesis."""
        end = self.find(")", pos)
        found = []
        for part in filter(None, (p.strip() for p in self.text[pos + 1 : end].split(","))):
            v = parse_variable(part)
            if v is None:
                raise self.fail(pos, f"not a parameter: {_short(part)!r}")
            found.append(v)
        return found, self.skip_space(end + 1)


class _Body:
    """Reads one function body."""

    def __init__(self, parser: _Parser, function: Function) -> None:
        self.p, self.f = parser, function
        self.scopes: list[dict[str, str]] = [{}]
        self.known: dict[str, Operand] = {}  # registers and literals, as these scopes have them
        self.n_scopes = 0
        self.source: tuple[int, int] | None = None
        self.branches: list[tuple[Instruction, list[dict[str, str]]]] = []

    def read(self, pos: int) -> int:
        text = self.p.text
        while True:
            pos = self.p.latest = self.p.skip_space(pos)
            if pos >= len(text):
                raise self.p.fail(len(text) - 1, f"function {self.f.name} has no closing brace")
            first = text[pos]
            if first == "{":
                self.n_scopes += 1
                self.scopes.append({})
                pos += 1
            elif first == "}":
                self.scopes.pop()
                self.known.clear()
                pos += 1
                if not self.scopes:
                    self.resolve()
                    return pos
            elif first == "." and (m := _DIRECTIVE.match(text, pos)):
                if m.group(1) == "loc" and (loc := _SOURCE_LINE.match(m.group(2))):
                    if int(loc.group(2)):  # line 0: no source line; the latest one stays
                        self.source = int(loc.group(1)), int(loc.group(2))
                    pos = self.p.find("\n", m.end() - 1)
                else:
                    pos = self.p.directive(m)
            elif m := _LABEL.match(text, pos):
                pos = self.label(m)
            else:
                end = self.p.find(";", pos)
                self.statement(text[pos:end].strip(), pos)
                pos = end + 1

    def label(self, m: re.Match[str]) -> int:
        text, name = self.p.text, m.group(1)
        after = self.p.skip_space(m.end())
        if text.startswith((".branchtargets", ".calltargets", ".callprototype"), after):
            end = self.p.find(";", after)
            words = text[after:end].split(None, 1)
            if words[0] == ".branchtargets":
                self.f.tables[name] = tuple(w.strip() for w in words[1].split(","))
            return end + 1
        self.f.labels[self.declare(name)] = len(self.f.code)
        return m.end()

    def declare(self, name: str) -> str:
        """Return the function-wide name of a name declared in the innermost scope."""
        self.known.pop(name, None)
        unique = name if len(self.scopes) == 1 else f"{name}@{self.n_scopes}"
        self.scopes[-1][name] = unique
        return unique

    def lookup(self, name: str, scopes: list[dict[str, str]] | None = None) -> str | None:
        for scope in reversed(self.scopes if scopes is None else scopes):
            if name in scope:
                return scope[name]
        return None

    def statement(self, text: str, pos: int) -> None:
        if not text:
            return
        if not text.startswith("."):
            self.instruction(text, pos)
        elif m := _REGISTERS.match(text):
            self.registers(m, pos)
        else:
            v = parse_variable(text)
            if v is None:
                raise self.p.fail(pos, f"unknown declaration {_short(text)!r}")
            self.f.variables.append(replace(v, name=self.declare(v.name)))

    def registers(self, m: re.Match[str], pos: int) -> None:
        if m.group(1) not in TYPES:
            raise self.p.fail(pos, f"unknown register type .{m.group(1)}")
        kind = TYPES[m.group(1)]
        for item in (i.strip() for i in m.group(2).split(",")):
            if r := re.match(rf"({_NAME})<(\d+)>$", item):
                if int(r.group(2)) > 1 << 20:
                    raise self.p.fail(pos, f"{r.group(2)} registers of one name")
                for k in range(int(r.group(2))):
                    self.f.registers[self.declare(f"{r.group(1)}{k}")] = kind
            else:
                self.f.registers[self.declare(item)] = kind

    def instruction(self, text: str, pos: int) -> None:
        ins = Instruction((), (), " ".join(text.split()), self.p.line(pos), source=self.source)
        if text[0] == "@" and (g := _GUARD.match(text)):
            name = self.lookup(g.group(2))
            if name is None:
                raise self.p.fail(pos, f"undeclared predicate {g.group(2)}")
            ins.guard = (Reg(name), g.group(1) == "!")
            text = g.group(3)
        m = _OPCODE.match(text)
        if m is None:
            raise self.p.fail(pos, f"not an instruction: {_short(text)!r}")
        ins.op = tuple(m.group(1).split("."))
        if ins.opcode in ("bra", "brx"):
            self.branches.append((ins, list(self.scopes)))
            names = [a.strip() for a in m.group(2).split(",")]
            ins.args = tuple(
                self.operand(a, pos) if self.lookup(a) in self.f.registers else Sym(a)
                for a in names
            )
        else:
            ins.args = tuple([self.operand(a, pos) for a in split_operands(m.group(2))])
        self.f.code.append(ins)

    def operand(self, text: str, pos: int) -> Operand:
        text = text.strip()
        found = self.known.get(text)
        if found is None:
            found = self.new_operand(text, pos)
            if isinstance(found, (Reg, Imm)):
                self.known[text] = found
        return found

    def new_operand(self, text: str, pos: int) -> Operand:
        if text == "_":
            return Skip()
        if text[:1] in "{(":
            return Vec(tuple(self.operand(t, pos) for t in split_operands(text[1:-1])))
        if text[:1] == "[":
            return self.address(text[1:-1], pos)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self.operand(first, pos), self.operand(second, pos))
        if text[:1] == "!":
            inner = self.operand(text[1:], pos)
            if not isinstance(inner, Reg):
                raise self.p.fail(pos, f"only a predicate can be negated, not {text!r}")
            return Not(inner)
        if _NUMBER.match(text):
            return number(text)
        if name := self.lookup(text):
            return Reg(name) if name in self.f.registers else Sym(name)
        if _SPECIAL.match(text):
            return Special(text)
        if m := re.match(rf"({_NAME})\s*([+-]\s*\w+)?$", text):
            name = self.lookup(m.group(1)) or m.group(1)
            return Sym(name, int(m.group(2).replace(" ", ""), 0) if m.group(2) else 0)
        raise self.p.fail(pos, f"not an operand: {_short(text)!r}")

    def address(self, text: str, pos: int) -> Operand:
        m = re.match(r"\s*([^+\-\s]+|-\w+)\s*(?:([+-])\s*(-?\w+))?\s*$", text)
        if m is None:
            raise self.p.fail(pos, f"not an address: [{_short(text)}]")
        base = self.operand(m.group(1), pos)
        offset = int(m.group(3), 0) * (-1 if m.group(2) == "-" else 1) if m.group(3) else 0
        if not isinstance(base, (Reg, Sym, Imm)):
            raise self.p.fail(pos, f"not an address: [{_short(text)}]")
        return Addr(base, offset)

    def resolve(self) -> None:
        """Name the targets of branches by their function-wide labels."""
        for ins, scopes in self.branches:
            tables = ins.args[-1:] if ins.opcode == "brx" else ins.args
            for a in tables:
                if not isinstance(a, Sym):
                    raise ParseError(f"PTX line {ins.line}: branch to something not a label")
                if ins.opcode == "brx":
                    if a.name not in self.f.tables:
                        raise ParseError(f"PTX line {ins.line}: no .branchtargets {a.name}")
                    continue
                name = self.lookup(a.name, scopes) or a.name
                if name not in self.f.labels:
                    raise ParseError(f"PTX line {ins.line}: no label {a.name}")
                ins.args = (Sym(name),)


def parse_variable(text: str) -> Variable | None:
    """Parse one declaration (without its semicolon); None if it is not one."""
    m = _VARIABLE.match(text.strip())
    if m is None or m.group("type") not in TYPES:
        return None
    kind = TYPES[m.group("type")]
    width = max(kind.nbytes, 1) * (int(m.group("vec")[1:]) if m.group("vec") else 1)
    count = 1
    for n in re.findall(r"\[\s*(\d*)\s*\]", m.group("dims")):
        count *= int(n) if n else 0
    mods = (m.group("mods") or "") + (m.group("mods2") or "")
    pointee = re.search(r"\.ptr\b", mods)  # ".ptr .align n" speaks of the array pointed to
    align = re.search(r"\.align\s+(\d+)", mods[: pointee.start()] if pointee else mods)
    init = _initial(m.group("init") or "")
    if count == 0 and init:
        count = len(init)
    return Variable(
        m.group("name"),
        m.group("space"),
        kind,
        width * count,
        int(align.group(1)) if align else width,
        init,
    )


def _initial(text: str) -> tuple[Imm | str, ...]:
    words = re.findall(r"[^\s,{}()]+", text)
    values: list[Imm | str] = []
    for w in words:
        values.append(number(w) if _NUMBER.match(w) else w)
    return tuple(v for v in values if v not in ("generic", "+"))


def number(text: str) -> Imm:
    """Parse a literal."""
    sign, digits = (-1, text[1:]) if text[0] == "-" else (1, text)
    digits = digits.rstrip("U")
    head = digits[:2].lower()
    if head == "0f" and len(digits) == 10:
        return Imm(int(digits[2:], 16) ^ (0x80000000 if sign < 0 else 0), 4)
    if head == "0d" and len(digits) == 18:
        return Imm(int(digits[2:], 16) ^ (1 << 63 if sign < 0 else 0), 8)
    if head in ("0x", "0b"):
        return Imm(sign * int(digits, 0))
    if "." in digits:
        return Imm(int.from_bytes(struct.pack("<d", sign * float(digits)), "little"), 8)
    octal = len(digits) > 1 and digits[0] == "0"
    return Imm(sign * int(digits, 8 if octal else 10))


def split_operands(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    if "{" not in text and "(" not in text:
        return [p for p in map(str.strip, _COMMA.split(text)) if p]
    parts, depth, start = [], 0, 0
    for k, ch in enumerate(text):
        if ch in "{[(":
            depth += 1
        elif ch in "}])":
            depth -= 1
        elif ch == "," and depth == 0:
            parts.append(text[start:k].strip())
            start = k + 1
    parts.append(text[start:].strip())
    return [p for p in parts if p]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."
