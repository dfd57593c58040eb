"""A machine for pickles that can only build descriptions: it imports, calls and executes nothing.

It knows the opcodes of protocols 1 to 5 that torch writes.  What makes objects of arbitrary classes
(INST, OBJ, NEWOBJ_EX, EXT1..4), text forms of protocol 0, and every name that is not in
`nbflow.weights.pickle_values.GLOBALS` are refused, with the position.

Memory is bounded before it is taken: by the length of the pickle for strings, by counts for
everything else.  Dicts are lists of pairs, so that no key is hashed; nothing here recurses.

Opcodes: https://github.com/python/cpython/blob/v3.12.0/Lib/pickletools.py
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NoReturn

from nbflow.weights.byte_cursor import ByteCursor
from nbflow.weights.pickle_values import GLOBALS, Global, Inert, Refused, Table, describe
from nbflow.weights.shown import shown
from nbflow_kernels.errors import UsageError

MAX_PICKLE_BYTES = 1 << 26
MAX_OPERATIONS = 1 << 21  # at up to 300 bytes each if a file is made to waste them
MAX_MARKS = 1 << 10
_MAX_INTEGER_BYTES = 16
_MAX_LINE = 256

_REFUSED = {
    b"S": "STRING",
    b"V": "UNICODE",
    b"P": "PERSID",
    b"i": "INST",
    b"o": "OBJ",
    b"\x82": "EXT1",
    b"\x83": "EXT2",
    b"\x84": "EXT4",
    b"\x92": "NEWOBJ_EX",
    b"\x97": "NEXT_BUFFER",
    b"\x98": "READONLY_BUFFER",
}


class PickleMachine:
    """Runs pickles one after the other from a file.

    Parameters
    ----------
    cursor : ByteCursor
        Where the first pickle begins; after `load` it stands behind the STOP.
    persistent : callable
        Makes a storage of a persistent id; raises `Refused` if the id is none.
    """

    def __init__(self, cursor: ByteCursor, persistent: Callable[[Any], Any]) -> None:
        self._cursor = cursor
        self._persistent = persistent
        self._n_left = MAX_OPERATIONS
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """Run one pickle and return its value.

        Raises
        ------
        UsageError
            If it does anything but describe tensors and plain values; the message names the
            opcode or the name, and the position.
        """
        self._stack, self._marks, self._memo = [], [], {}
        while True:
            position = self._cursor.position
            code = self._cursor.take(1, "a pickle's next opcode")
            try:
                self._charge(1)
                if code == b".":
                    value = self._pop()
                    if self._stack or self._marks:
                        raise Refused("STOP before everything is put together")
                    return value
                operation = _OPERATIONS.get(code)
                if operation is None:
                    name = _REFUSED.get(code, f"0x{code[0]:02x}")
                    raise Refused(f"opcode {name}, which no state dict needs")
                operation(self)
            except Refused as problem:
                self._refuse(position, problem)

    def _refuse(self, position: int, problem: Refused) -> NoReturn:
        raise UsageError(
            f"{self._cursor.file.path}: the pickle has {problem} at byte {position}; nothing was "
            "imported or executed.  Only tensors in dicts and lists can be read: save "
            "model.state_dict(), or convert the file to safetensors where you trust it"
        ) from None

    def _charge(self, n: int) -> None:
        """Count operations, or elements that one operation copies."""
        self._n_left -= n
        if self._n_left < 0:
            raise Refused(f"more than {MAX_OPERATIONS} operations")

    # The stack

    def _floor(self) -> int:
        return self._marks[-1] if self._marks else 0

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if len(self._stack) <= self._floor():
            raise Refused("an operation on an empty stack")
        return self._stack.pop()

    def _top(self) -> Any:
        if len(self._stack) <= self._floor():
            raise Refused("an operation on an empty stack")
        return self._stack[-1]

    def _pop_mark(self) -> list[Any]:
        """Return what lies above the last MARK, and take it away."""
        if not self._marks:
            raise Refused("an operation that needs a MARK, but there is none")
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    # Reading arguments

    def _number(self, code: str) -> Any:
        return self._cursor.number(code, "a number in the pickle")

    def _bytes(self, length: str) -> bytes:
        return self._cursor.take(self._number(length), "a string in the pickle")

    def _line(self) -> bytes:
        return self._cursor.line(_MAX_LINE, "a line in the pickle")

    # Operations

    def _mark(self) -> None:
        if len(self._marks) >= MAX_MARKS:
            raise Refused(f"more than {MAX_MARKS} MARKs within each other")
        self._marks.append(len(self._stack))

    def _pop_any(self) -> None:
        if self._marks and len(self._stack) == self._marks[-1]:
            self._marks.pop()
        else:
            self._pop()

    def _drop_mark(self) -> None:
        self._pop_mark()

    def _protocol(self) -> None:
        protocol = self._number("B")
        if protocol > 5:
            raise Refused(f"protocol {protocol} (known are 0 to 5)")

    def _unicode(self, length: str) -> None:
        self._push(self._bytes(length).decode("utf-8", errors="surrogateescape"))

    def _latin(self, length: str) -> None:
        """Push a string of Python 2."""
        self._push(self._bytes(length).decode("latin-1"))

    def _integer(self, length: str) -> None:
        n_bytes = self._number(length)
        if not 0 <= n_bytes <= _MAX_INTEGER_BYTES:
            raise Refused(f"an integer of {n_bytes} bytes (at most {_MAX_INTEGER_BYTES})")
        data = self._cursor.take(n_bytes, "an integer in the pickle")
        self._push(int.from_bytes(data, "little", signed=True))

    def _text_integer(self) -> None:
        line = self._line()
        if line in (b"00", b"01"):
            self._push(line == b"01")
        else:
            self._push(_parse_integer(line))

    def _text_float(self) -> None:
        line = self._line()
        try:
            self._push(float(line))
        except ValueError:
            raise Refused(f"the float {shown(line)}") from None

    def _tuple(self, n: int) -> None:
        items = [self._pop() for _ in range(n)]
        self._push(tuple(reversed(items)))

    def _append(self) -> None:
        value = self._pop()
        self._list().append(value)

    def _appends(self) -> None:
        items = self._pop_mark()
        self._list().extend(items)

    def _list(self) -> list[Any]:
        target = self._top()
        if type(target) is not list:
            raise Refused(f"APPEND to {describe(target)}")
        return target

    def _dict(self) -> None:
        items = self._pop_mark()
        self._push(Table())
        self._set_items(items)

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _set_items(self, items: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, Table) or len(items) % 2:
            raise Refused(f"SETITEMS of {len(items)} values on {describe(target)}")
        for key in items[::2]:
            if not isinstance(key, (str, bytes, int, float, tuple, type(None))):
                raise Refused(f"a dict with the key {describe(key)}")
        target.items.extend(zip(items[::2], items[1::2], strict=True))

    def _add_items(self) -> None:
        self._pop_mark()
        if not isinstance(self._top(), Inert):
            raise Refused(f"ADDITEMS to {describe(self._top())}")

    def _frozen_set(self) -> None:
        self._pop_mark()
        self._push(Inert("frozenset"))

    def _global(self) -> None:
        module, name = (self._line().decode("latin-1") for _ in range(2))
        self._push(_lookup(module, name))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise Refused(f"a name made of {describe(module)} and {describe(name)}")
        self._push(_lookup(module, name))

    def _reduce(self) -> None:
        args, function = self._pop(), self._pop()
        if type(args) is not tuple:
            raise Refused(f"a call with {describe(args)} instead of a tuple")
        if not isinstance(function, Global) or function.kind != "call":
            raise Refused(f"a call of {describe(function)}")
        for value in args:
            if isinstance(value, Table):
                self._charge(len(value.items))
            elif type(value) is list:
                self._charge(len(value))
        self._push(function.meaning(args))

    def _new_object(self) -> None:
        args, cls = self._pop(), self._pop()
        if cls is not GLOBALS["argparse.Namespace"] or args != ():
            raise Refused(f"an object of {describe(cls)}")
        self._push(Inert("argparse.Namespace"))

    def _build(self) -> None:
        """Drop attributes, e.g. torch's ``_metadata`` of an OrderedDict."""
        self._pop()
        target = self._top()
        if not isinstance(target, (Table, Inert)):
            raise Refused(f"BUILD (__setstate__) of {describe(target)}")

    def _persistent_id(self) -> None:
        self._push(self._persistent(self._pop()))

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise Refused(f"memo {index}, which was never put")
        self._push(self._memo[index])

    def _put(self, index: int) -> None:
        if not 0 <= index < 1 << 32:
            raise Refused(f"memo {index}")
        self._memo[index] = self._top()

    def _frame(self) -> None:
        n_bytes = self._number("Q")
        if n_bytes > self._cursor.left:
            raise Refused(f"a frame of {n_bytes} bytes, where {self._cursor.left} are left")


def _lookup(module: str, name: str) -> Global:
    """Return what a name stands for here; nothing is imported."""
    full = f"{module[:_MAX_LINE]}.{name[:_MAX_LINE]}"
    found = GLOBALS.get(full)
    if found is None:
        raise Refused(f"the name {shown(full)}, which no state dict needs,")
    return found


def _parse_integer(line: bytes) -> int:
    """Return an integer written in decimal, of at most 16 bytes."""
    digits = line.removesuffix(b"L")
    if not digits.removeprefix(b"-").isdigit() or len(digits) > 39:
        raise Refused(f"the integer {shown(line)}")
    return int(digits)


_OPERATIONS: dict[bytes, Callable[[PickleMachine], None]] = {
    b"\x80": PickleMachine._protocol,
    b"\x95": PickleMachine._frame,
    b"(": PickleMachine._mark,
    b"0": PickleMachine._pop_any,
    b"1": PickleMachine._drop_mark,
    b"2": lambda m: m._push(m._top()),
    b"N": lambda m: m._push(None),
    b"\x88": lambda m: m._push(True),
    b"\x89": lambda m: m._push(False),
    b"I": PickleMachine._text_integer,
    b"L": lambda m: m._push(_parse_integer(m._line())),
    b"F": PickleMachine._text_float,
    b"J": lambda m: m._push(m._number("i")),
    b"K": lambda m: m._push(m._number("B")),
    b"M": lambda m: m._push(m._number("H")),
    b"\x8a": lambda m: m._integer("B"),
    b"\x8b": lambda m: m._integer("i"),
    b"G": lambda m: m._push(struct.unpack(">d", m._cursor.take(8, "a float in the pickle"))[0]),
    b"X": lambda m: m._unicode("I"),
    b"\x8c": lambda m: m._unicode("B"),
    b"\x8d": lambda m: m._unicode("Q"),
    b"T": lambda m: m._latin("I"),
    b"U": lambda m: m._latin("B"),
    b"B": lambda m: m._push(m._bytes("I")),
    b"C": lambda m: m._push(m._bytes("B")),
    b"\x8e": lambda m: m._push(m._bytes("Q")),
    b"\x96": lambda m: m._push(m._bytes("Q")),
    b"]": lambda m: m._push([]),
    b")": lambda m: m._push(()),
    b"}": lambda m: m._push(Table()),
    b"\x8f": lambda m: m._push(Inert("set")),
    b"l": lambda m: m._push(m._pop_mark()),
    b"d": PickleMachine._dict,
    b"t": lambda m: m._push(tuple(m._pop_mark())),
    b"\x85": lambda m: m._tuple(1),
    b"\x86": lambda m: m._tuple(2),
    b"\x87": lambda m: m._tuple(3),
    b"a": PickleMachine._append,
    b"e": PickleMachine._appends,
    b"s": PickleMachine._set_item,
    b"u": lambda m: m._set_items(m._pop_mark()),
    b"\x90": PickleMachine._add_items,
    b"\x91": PickleMachine._frozen_set,
    b"c": PickleMachine._global,
    b"\x93": PickleMachine._stack_global,
    b"R": PickleMachine._reduce,
    b"\x81": PickleMachine._new_object,
    b"b": PickleMachine._build,
    b"Q": PickleMachine._persistent_id,
    b"g": lambda m: m._get(_parse_integer(m._line())),
    b"h": lambda m: m._get(m._number("B")),
    b"j": lambda m: m._get(m._number("I")),
    b"p": lambda m: m._put(_parse_integer(m._line())),
    b"q": lambda m: m._put(m._number("B")),
    b"r": lambda m: m._put(m._number("I")),
    b"\x94": lambda m: m._put(len(m._memo)),
}
"""Opcode -> what it does."""
