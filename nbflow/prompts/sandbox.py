"""Jinja templates from strangers, with bounds on what they may use.

A chat template is a program that came with a model file.  Jinja's immutable sandbox keeps it from
reaching Python's insides and from changing what it was given.  Here it also gets a `Budget`: every
turn of a loop and every call, filter and output is a step, every text it makes is paid for by its
length, and processor time is limited.  What can only blow a text up (``center``, ``zfill``) is not
there.

To see every turn and every text, the parsed template is changed before it is compiled: what a loop
runs over, ``~`` and literal text go through functions that count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from nbflow.prompts.budget import Budget, check_numbers
from nbflow_kernels.errors import UsageError

_TEXT_METHODS = frozenset({
    "capitalize", "casefold", "count", "endswith", "find", "format", "format_map", "index",
    "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower",
    "isnumeric", "isprintable", "isspace", "istitle", "isupper", "join", "lower", "lstrip",
    "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition",
    "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
})  # fmt: skip
_FILTERS = (
    "abs", "attr", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape",
    "first", "float", "format", "groupby", "indent", "int", "items", "join", "last", "length",
    "list", "lower", "map", "max", "min", "pprint", "reject", "rejectattr", "replace", "reverse",
    "round", "safe", "select", "selectattr", "slice", "sort", "string", "striptags", "sum",
    "title", "trim", "truncate", "unique", "upper", "wordcount",
)  # fmt: skip
_WRITERS = frozenset({"string", "pprint", "tojson", "escape", "e", "trim", "upper", "lower"})
"""Filters that write a value as text."""


class Environment(ImmutableSandboxedEnvironment):
    """The environment of one run: its settings are those of ``transformers``."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        self.budget = Budget()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlocks, loopcontrols],
            optimized=False,  # nothing is computed while it is compiled
            finalize=self._output,
        )
        allowed = {name: self.filters[name] for name in _FILTERS if name in self.filters}
        self.filters.clear()
        for name, function in {**allowed, "tojson": _tojson}.items():
            self.filters[name] = self._counted(name, function)
        self.filters["_concat"] = self._concat
        self.filters["_turns"] = self.budget.turns
        self.filters["_made"] = self.budget.made
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return template

    @pass_context
    def _output(self, context: Any, value: Any) -> Any:
        """Pay for what is written."""
        self.budget.text_of(value)
        return value

    def _concat(self, values: list[Any]) -> str:
        """Join as ``~`` does."""
        self.budget.text_of(values)
        return "".join(map(str, values))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that pays for what it makes."""
        n_own = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context comes before the value

        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            own, (value, *rest) = arguments[:n_own], arguments[n_own:]
            value = self.budget.listed(value)
            self._pay_filter(name, value, [*rest, *options.values()])
            return self.budget.made(function(*own, value, *rest, **options))

        return run

    def _pay_filter(self, name: str, value: Any, rest: list[Any]) -> None:
        """Pay for a filter before it runs."""
        self.budget.step()
        if name in ("batch", "slice", "indent", "truncate", "round"):
            check_numbers(rest)
        if name in _WRITERS and not isinstance(value, str):
            self.budget.text_of(value)
        elif name == "replace":
            self.budget.replaced(str(value), tuple(rest))
        elif name == "join":
            self.budget.joined(str(rest[0]) if rest else "", value)
        elif name == "format":
            self.budget.formatted(str(value), rest)
        elif name == "indent":
            width = len(rest[0]) if rest and isinstance(rest[0], str) else int((rest or [4])[0])
            self.budget.characters(str(value).count("\n") * width)
        elif name == "sum" and any(isinstance(start, list | tuple) for start in rest):
            raise SecurityError("sum adds numbers only")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute ``*``, ``**``, ``+`` or ``%`` within the budget."""
        self.budget.binary(operator, left, right)
        return self.budget.made(super().call_binop(context, operator, left, right))

    def call(
        self,
        context: Any,
        function: Any,
        /,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Call a function, macro or method within the budget."""
        self.budget.step()
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            arguments = self._pay_method(owner, method.__name__, arguments, options)
        result = super().call(context, function, *arguments, **options)
        return result if isinstance(function, Macro) else self.budget.made(result)

    def _pay_method(
        self, owner: str, name: str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Pay for a method of a text before it runs; return its arguments, iterators as lists."""
        if name not in _TEXT_METHODS:
            raise SecurityError(f"the method {name!r} of a text is not available")
        arguments = tuple(self.budget.listed(argument) for argument in arguments)
        check_numbers([*arguments, *options.values()] if "format" not in name else [])
        if name == "replace":
            self.budget.replaced(owner, arguments)
        elif name == "join" and arguments:
            self.budget.joined(owner, arguments[0])
        elif name.startswith("format"):
            self.budget.formatted(owner, [*arguments, *options.values()])
        return arguments


class _Counting(NodeTransformer):
    """Sends loops, ``~``, slices and literal text through functions that count."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Count the turns."""
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_turns")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Count the characters."""
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        """Count what a slice copies."""
        self.generic_visit(node)
        return _filtered(node, "_made") if isinstance(node.arg, nodes.Slice) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        """Let `finalize` see literal text."""
        return nodes.Const(node.data, lineno=node.lineno)


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class GenerationBlocks(Extension):
    """``{% generation %}``: marks what the model writes, for training; here its body counts."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    """Refuse a conversation, as templates do."""
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    """Return date and time, as templates ask for them."""
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
    """Write JSON as ``transformers`` does for templates: any letters, nothing escaped for HTML."""
    if indent is not None and not 0 <= indent <= 16:
        raise SecurityError("tojson: indent must be 0..16")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def render(template: str, variables: dict[str, Any], where: str) -> str:
    """Run a template.

    Parameters
    ----------
    template : str
        Jinja source.
    variables : dict
        What it may refer to.
    where : str
        Its name, for messages.

    Returns
    -------
    str
        Its output.

    Raises
    ------
    UsageError
        If it cannot be read, refuses the conversation, does what is not allowed or takes too much.
    """
    try:
        return "".join(Environment().from_string(template).generate(**variables))
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"{where}: line {error.lineno}: {error.message}") from error
    except SecurityError as error:
        raise UsageError(f"{where}: not allowed: {error}") from error
    except jinja2.UndefinedError as error:
        raise UsageError(f"{where}: needs what it was not given: {error}") from error
    except jinja2.TemplateError as error:
        raise UsageError(f"{where}: refuses this conversation: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{where}: is nested too deeply") from error
    except Exception as error:  # whatever a program can raise: TypeError, KeyError, ...
        raise UsageError(f"{where}: fails: {type(error).__name__}: {error}") from error
