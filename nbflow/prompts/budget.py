"""What one run of a template may use: steps, characters and processor time."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

from jinja2.exceptions import SecurityError

MAX_STEPS = 2_000_000
MAX_CHARACTERS = 100_000_000
MAX_PROCESSOR_S = 10.0
_MAX_NUMBER = 1_000_000  # where it is a width, an indent or a count
_ENTRY = 8  # what an entry of a list costs, in characters
_MAX_BITS = 4096  # of a whole number
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)|\{[^}]*(\d{5,}|\{)")


class Budget:
    """What one run may still use; running out raises `SecurityError`."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._characters = MAX_CHARACTERS
        self._end_s = time.thread_time() + MAX_PROCESSOR_S

    def step(self, n: int = 1) -> None:
        """Pay for `n` steps."""
        self._steps -= n
        if self._steps < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS:,} steps")
        if time.thread_time() > self._end_s:
            raise SecurityError(f"it takes more than {MAX_PROCESSOR_S:.0f} s of processor time")

    def characters(self, n: int) -> None:
        """Pay for a text of `n` characters."""
        self._characters -= max(n, 0)
        if self._characters < 0:
            raise SecurityError(f"it makes more than {MAX_CHARACTERS:,} characters of text")

    def made(self, value: Any) -> Any:
        """Pay for a value that has been made, and return it."""
        if isinstance(value, str | bytes | list | tuple | dict):
            self.characters(len(value) * (1 if isinstance(value, str | bytes) else _ENTRY))
        return value

    def text_of(self, value: Any) -> int:
        """Pay for what `value` is as text, with all that is in it; return the length."""
        total, todo = 0, [value]
        while todo:
            item = todo.pop()
            if isinstance(item, dict):
                todo += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple | set | frozenset):
                todo += item
            n = len(item) if isinstance(item, str | bytes) else _ENTRY
            self.step()
            self.characters(n)
            total += n
        return total

    def turns(self, values: Any) -> Any:
        """Pay for the turns of a loop over `values`, and return them."""
        try:
            self.step(len(values))
        except TypeError:
            return self._one_by_one(values)
        return values

    def _one_by_one(self, values: Any) -> Iterator[Any]:
        for value in values:
            self.step()
            yield value

    def listed(self, values: Any) -> Any:
        """Return an iterator as a list, paid for; anything else as it is."""
        return list(self._one_by_one(values)) if isinstance(values, Iterator) else values

    def replaced(self, text: str, arguments: tuple[Any, ...]) -> None:
        """Pay for ``text.replace(*arguments)``."""
        if len(arguments) >= 2 and all(isinstance(a, str) for a in arguments[:2]):
            self.characters(text.count(arguments[0]) * len(arguments[1]))

    def joined(self, separator: str, values: Any) -> None:
        """Pay for ``separator.join(values)``."""
        self.text_of(values)
        self.characters(len(separator) * (len(values) if hasattr(values, "__len__") else 0))

    def formatted(self, text: str, arguments: Any) -> None:
        """Pay for a text with ``%`` or ``{}`` filled in."""
        if _WIDE_FORMAT.search(text):
            raise SecurityError("a format must not have a width of five digits or a nested field")
        self.characters((text.count("%") + text.count("{")) * self.text_of(arguments))

    def binary(self, operator: str, left: Any, right: Any) -> None:
        """Pay for ``*``, ``**``, ``+`` or ``%``."""
        self.step()
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length()
            if operator == "**":
                bits = left.bit_length() * max(right, 0)
            if operator != "%" and bits > _MAX_BITS:
                raise SecurityError("a number is too large")
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    self.characters(len(many) * times * (1 if isinstance(many, str) else _ENTRY))
        elif operator == "%" and isinstance(left, str):
            self.formatted(left, right)


def check_numbers(values: list[Any]) -> None:
    """Refuse numbers that could be the width of something huge."""
    if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in values):
        raise SecurityError(f"a number given to a method or filter is above {_MAX_NUMBER:,}")
