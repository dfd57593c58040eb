"""Jinja's immutable sandbox for chat templates, with bounded processor time and memory.

A chat template is an untrusted program from a model file.  Jinja's sandbox hides Python internals
and makes variables immutable, but bounds neither time nor memory.  `Environment` counts loop
iterations, calls and filters, and the sizes of the strings and lists that they return.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from nbflow_kernels.errors import UsageError

MAX_CHARACTERS = 100_000_000
MAX_PROCESSOR_S = 10.0
_STEP = 200  # cost of an iteration, call, filter or written entry, in characters
_ENTRY = 8  # cost of a list entry, in characters: the size of a pointer
_PART = 64  # cost of a part of a text: the size of a short string
_MAX_BITS = 4096
_MAX_WIDTH = 100
_MAX_FIELD = 999
_WIDE_FORMAT = re.compile(
    r"%[^a-zA-Z%]*(\d{4,}|\*)|\{[^}]*(\d{4,}|\{)"
    r"|%\((?!\w*\)[-+ #]*\d{0,3}(\.\d{0,3})?[a-zA-Z%])"  # %(name)
)
_NO_METHODS = frozenset(
    {"center", "encode", "expandtabs", "ljust", "rjust", "to_bytes", "translate", "zfill"}
)
_NO_FILTERS = ("batch", "center", "filesizeformat", "random", "slice", "urlize", "wordwrap")
_NO_TEXT = frozenset({
    "attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject",
    "rejectattr", "reverse", "select", "selectattr", "sum",
})  # fmt: skip
"""Filters that neither convert their value to text nor compare its entries."""
_COMPARE = (
    "eq", "equalto", "==", "ne", "!=", "gt", "greaterthan", ">", "ge", ">=", "lt", "lessthan", "<",
    "le", "<=", "in",
)  # fmt: skip
"""Tests that compare values."""


class Environment(ImmutableSandboxedEnvironment):
    """Environment of one run, with the settings of ``transformers``."""

    intercepted_binops = frozenset({"*", "**", "+", "%", "//"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlocks, loopcontrols],
            optimized=False,  # no constant folding at compile time
            finalize=self._count_text,
        )
        self._left = MAX_CHARACTERS
        self._end_s = time.thread_time() + MAX_PROCESSOR_S
        self.concat = self._concat  # type: ignore[method-assign]
        own = {"tojson": _tojson, "_concat": self._concat}
        allowed = {name: f for name, f in self.filters.items() if name not in _NO_FILTERS}
        self.filters = {name: self._counted(name, f) for name, f in {**allowed, **own}.items()}
        self.filters |= {"_iterate": self._iterate, "_count": self._count}
        self.filters["_compare"] = self._count_nested
        tests: dict[str, Any] = self.tests
        tests |= {name: self._counted_test(tests[name]) for name in _COMPARE}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return template

    def _spend(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0:
            raise SecurityError(
                f"the template makes more than {MAX_CHARACTERS:,} characters of text, or takes "
                f"more than {MAX_CHARACTERS // _STEP:,} steps"
            )

    def _step(self, n: int = 1) -> None:
        """Count iterations or calls, and check the clock."""
        self._spend(n * _STEP)
        if time.thread_time() > self._end_s:
            raise SecurityError(f"the template takes more than {MAX_PROCESSOR_S} s")

    def _count(self, value: Any) -> Any:
        """Count a new value, and return it."""
        if isinstance(value, str | bytes | list | tuple | dict):
            self._spend(len(value) * (1 if isinstance(value, str | bytes) else _ENTRY))
        return value

    def _count_text(self, value: Any) -> Any:
        """Count a value as text, nested values included, and return it."""
        self._spend(len(value)) if isinstance(value, str) else self._size(value)
        return value

    def _size(self, value: Any) -> int:
        """Count a value as text, nested values included, and return the length."""
        before, todo = self._left, [value]
        while todo:
            item = todo.pop()
            if isinstance(item, dict):
                todo += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                todo += item
            self._spend(len(item) if isinstance(item, str | bytes) else _STEP)
        return before - self._left

    def _count_nested(self, value: Any) -> Any:
        """Count a list, tuple or dict before it is compared or hashed, and return it.

        Lists that hold a list twice, level by level, take time that is exponential in the levels.
        """
        if isinstance(value, list | tuple | dict):
            self._size(value)
        return value

    def _counted_test(self, test: Callable[..., Any]) -> Callable[..., Any]:
        """Return a test that counts what it compares."""

        @wraps(test)
        def run(*arguments: Any, **options: Any) -> Any:
            return test(*map(self._count_nested, arguments), **options)

        return run

    def _iterate(self, values: Iterable[Any]) -> Iterator[Any]:
        """Count the iterations over `values`."""
        n_known = len(values) if isinstance(values, Sized) else 0
        self._step(n_known)
        for value in values:
            self._step(0 if n_known else 1)
            yield value

    def _concat(self, values: Iterable[Any]) -> str:
        """Join values: ``~``, macros and the output."""
        return "".join(str(self._count_text(value)) for value in values)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that counts its result."""
        n_own = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context precedes the value

        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            own, (value, *rest) = arguments[:n_own], arguments[n_own:]
            if isinstance(value, Iterator):
                value = list(self._iterate(value))
            if name not in _NO_TEXT:
                self._size(value)
            self._check(name, value, [*rest, *options.values()])
            return self._count(function(*own, value, *rest, **options))

        return run

    def _check(self, name: str, value: Any, rest: list[Any]) -> None:
        """Count the result of a filter or string method before it is computed."""
        self._step()
        if name == "replace" and len(rest) > 1:
            self._spend(str(value).count(str(rest[0])) * len(str(rest[1])))
        elif name == "join":
            self._spend(len(str(rest[0])) * len(value) if rest else 0)
        elif name in ("format", "format_map"):
            self._check_format(str(value), rest)
        elif name in ("indent", "round") and any(
            (len(n) if isinstance(n, str) else abs(n)) > _MAX_WIDTH
            for n in rest
            if isinstance(n, int | str)
        ):
            raise SecurityError(f"{name} takes at most {_MAX_WIDTH}")
        elif name == "indent":
            self._spend(str(value).count("\n") * _MAX_WIDTH)
        elif name in ("split", "rsplit", "splitlines"):
            text, by = str(value), rest[0] if rest else None
            n_parts = text.count(by) if isinstance(by, str) and by else len(text) // 2
            self._spend(n_parts * _PART)
        elif name == "tojson" and any(len(t) > _MAX_WIDTH for t in _separators(rest)):
            raise SecurityError(f"tojson takes separators of at most {_MAX_WIDTH} characters")
        elif name == "sum" and any(isinstance(start, list | tuple) for start in rest):
            raise SecurityError("sum adds numbers only")

    def _check_format(self, text: str, values: Any) -> None:
        if _WIDE_FORMAT.search(text):
            raise SecurityError("a format must not have a width of four digits or a nested field")
        self._spend((text.count("%") + text.count("{")) * (self._size(values) + _MAX_FIELD))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute ``*``, ``**``, ``+``, ``%`` or ``//`` with a bounded result."""
        if isinstance(left, int) and isinstance(right, int):
            n, m = left.bit_length(), right.bit_length()
            bits = n * max(right, 0) if operator == "**" else n + m
            if operator != "+" and bits > _MAX_BITS:
                raise SecurityError(f"numbers have more than {_MAX_BITS} bits")
        elif operator == "*":
            times = [n for n in (left, right) if isinstance(n, int)]
            self._spend(self._size([left, right]) * max([0, *times]))
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        return self._count(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *arguments: Any, **options: Any) -> Any:
        """Call a function, macro or method, and count its result."""
        if not isinstance(function, Macro):  # may compare its arguments, or make them keys
            for given in (*arguments, *options.values()):
                self._count_nested(given)
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
        owner = getattr(method, "__self__", None)
        if not isinstance(owner, str):
            self._step()
        elif method.__name__ == "join" and arguments:
            values = list(self._iterate(arguments[0]))
            self._size(values)
            self._check("join", values, [owner])
            arguments = (values,)
        else:
            self._check(method.__name__, owner, [*arguments, *options.values()])
        return self._count(super().call(context, function, *arguments, **options))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Hide string methods that only pad or encode."""
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)


class _Counting(NodeTransformer):
    """Routes loops, ``~``, slices, keys and comparisons, not intercepted, through filters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_iterate")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filtered(node, "_count")
        node.arg = _compared(node.arg)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        if len(operands) > 2 or not any(isinstance(each, nodes.Const) for each in operands):
            node.expr = _compared(node.expr)
            for operand in node.ops:
                operand.expr = _compared(operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _compared(node.key)
        return node


def _compared(node: Any) -> Any:
    return node if isinstance(node, nodes.Const) else _filtered(node, "_compare")


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _separators(values: list[Any]) -> list[str]:
    """Return the texts among arguments and in lists of them."""
    each = [v if isinstance(v, list | tuple) else [v] for v in values]
    return [text for texts in each for text in texts if isinstance(text, str)]


class GenerationBlocks(Extension):
    """``{% generation %}``, which marks the assistant's text for training; the body is kept."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    """Refuse the conversation."""
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    """Return the local date and time."""
    if not isinstance(format, str) or len(format) > 100 or re.search(r"%[^a-zA-Z%]*\d{3}", format):
        raise SecurityError("strftime_now takes a short format")
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as in ``transformers``: no escapes for non-ASCII letters or HTML."""
    if indent is not None and not 0 <= indent <= 16:
        raise SecurityError("tojson: indent must be 0..16")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def check_syntax(template: str, where: str) -> None:
    """Raise `UsageError`, which begins with `where`, for a syntax error of a Jinja template."""
    try:
        Environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"{where}: line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise UsageError(f"{where}: is nested too deeply") from error
    except ValueError as error:  # a number with thousands of digits
        raise UsageError(f"{where}: {error}") from error


def render(template: str, variables: dict[str, Any], where: str) -> str:
    """Return the output of a Jinja template.

    Raises `UsageError`, which begins with `where`, for a syntax error, a refused conversation, a
    forbidden operation or an exceeded bound.
    """
    try:
        return Environment().from_string(template).render(variables)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"{where}: line {error.lineno}: {error.message}") from error
    except SecurityError as error:
        raise UsageError(f"{where}: not allowed: {error}") from error
    except jinja2.UndefinedError as error:
        raise UsageError(f"{where}: uses an undefined variable: {error}") from error
    except jinja2.TemplateError as error:
        raise UsageError(f"{where}: refuses this conversation: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{where}: is nested too deeply") from error
    except Exception as error:  # TypeError, KeyError, ... of the template
        raise UsageError(f"{where}: fails: {type(error).__name__}: {error}") from error
