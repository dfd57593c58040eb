"""Fields of option sets: metadata, validation, JSON schema and documentation.

The option sets are in `nbflow.options`.  Keywords, TOML keys, HTTP fields and command-line options
share one validation and one message.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Union

from nbflow_kernels.errors import UsageError, unknown_name

MAX_INT = 2**31 - 1
"""Upper bound of counts, which kernels hold as int32."""
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class Option:
    """Metadata of a field."""

    help: str
    """One line for ``--help`` and tables."""
    more: str = ""
    """Further sentences for the documentation."""
    low: float | None = None
    """Minimum."""
    high: float | None = None
    """Maximum."""
    above: bool = False
    """Exclude `low` itself."""
    unit: str = ""
    """Unit of a number."""
    shown: str = ""
    """Meaning of the default None."""
    aliases: tuple[str, ...] = ()
    """Names in other programs that `OptionSet.parse` accepts."""
    flags: tuple[str, ...] = ()
    """Command-line flags; by default made from the name."""
    repeat: bool = False
    """List option that is repeated on the command line, once for each item."""
    metavar: str = ""
    """Placeholder in ``--help``."""
    file: bool = False
    """The value may name a file, relative to the TOML file."""
    suffix: str = ""
    """Suffix of such file names; other values are not file names."""
    size: bool = False
    """Number of bytes that may be given as text, e.g. "2GiB"."""
    cli: bool = True
    """Available on the command line."""
    toml: bool = True
    """Available in TOML files."""
    http: str | None = None
    """Name in HTTP requests; None for the same, empty for none."""
    http_default: str = ""
    """Meaning of an absent field in HTTP requests, where it differs from the default."""
    http_high: float | None = None
    """Maximum in HTTP requests."""


def option(default: Any, help: str, **metadata: Any) -> Any:
    """Return a dataclass field with an `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **metadata)})


@dataclass(frozen=True)
class OptionSet:
    """Base class of frozen dataclasses of options, validated at construction."""

    def __post_init__(self) -> None:
        for known in fields(type(self)).values():
            value = getattr(self, known.name)
            if value is not known.default:
                object.__setattr__(self, known.name, known.checked(value))

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Return the options of a mapping, e.g. keywords or a JSON object.

        Parameters
        ----------
        values : mapping
            Values by field name or alias; None stands for the default.

        Raises
        ------
        UsageError
            If a name is unknown or given twice, or a value has a wrong type or is out of bounds.

        Examples
        --------
        >>> from nbflow.options import SamplingParams
        >>> SamplingParams.parse({"temp": 0.7, "top_k": 20}).temperature
        0.7
        """
        known, others = fields(cls), aliases(cls)
        given: dict[str, Any] = {}
        for key, value in values.items():
            name = others.get(key, key)
            if name not in known:
                raise unknown_name("parameter", key, [*known, *others])
            if value is None:
                continue
            if name in given:
                raise UsageError(f"{name} is given twice, the second time as {key!r}")
            given[name] = value
        return cls(**given)

    def replaced(self, changes: Mapping[str, Any]) -> Self:
        """Return the options with some changed; raise `UsageError` for an unknown name."""
        known = fields(type(self))
        for name in changes:
            if name not in known:
                raise unknown_name("parameter", name, known)
        return dataclasses.replace(self, **changes)

    def given(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        pairs = ((f.name, f.default) for f in fields(type(self)).values())
        return {n: getattr(self, n) for n, usual in pairs if getattr(self, n) != usual}


@dataclass(frozen=True)
class OptionField:
    """Field of an option set."""

    name: str
    hint: Any
    """Resolved type annotation."""
    default: Any
    option: Option

    @property
    def outside_hint(self) -> Any:
        """Type of values from files, requests and the command line: no Python objects, no None."""
        kinds = [k for k in _union(self.hint) if k not in (object, Path, type(None))]
        kinds += [str] if self.option.size else []
        return Union[tuple(kinds)]  # noqa: UP007

    @property
    def choices(self) -> tuple[Any, ...]:
        """Values of a field with a `Literal` type."""
        return typing.get_args(self.hint) if typing.get_origin(self.hint) is Literal else ()

    @property
    def http_name(self) -> str:
        """Name in HTTP requests; empty for none."""
        return self.name if self.option.http is None else self.option.http

    @property
    def flags(self) -> tuple[str, ...]:
        """Command-line flags."""
        return self.option.flags or (f"--{self.name.replace('_', '-')}",)

    def checked(
        self, value: Any, *, outside: bool = False, http: bool = False, name: str | None = None
    ) -> Any:
        """Return a validated value, with a size converted to bytes.

        `outside` marks a value from a file, a request or the command line; `http` one of a request,
        which may have a lower maximum.  `name` is used in messages instead of the field's.
        """
        name, here = name or self.name, self.option
        if self.choices and isinstance(value, str) and value not in self.choices:
            raise unknown_name(name, value, self.choices, self.name)
        if here.size and isinstance(value, str):
            value = size_bytes(value, name)
        hint = self.outside_hint if outside or http else self.hint
        if not accepts(hint, value):
            wanted = describe(self.outside_hint)
            raise UsageError(f"{name} must be {wanted}, got {value!r:.60}", self.name)
        high = here.high if not http or here.http_high is None else here.http_high
        if isinstance(value, numbers.Real):
            number: Any = value
            low_ok = here.low is None or (here.low < number if here.above else here.low <= number)
            if not (low_ok and (high is None or number <= high)):
                bounds = describe_bounds(here.low, high, here.above)
                raise UsageError(f"{name} must be {bounds}, got {value!s:.60}", self.name)
        return value


OptionSetType = type[OptionSet]


def fields(kind: OptionSetType) -> dict[str, OptionField]:
    """Return the fields of an option set by name, its own before inherited ones."""
    return _fields(typing.cast(Any, kind))  # mypy does not see that classes are hashable


@functools.cache
def _fields(kind: Any) -> dict[str, OptionField]:
    hints = typing.get_type_hints(kind)
    found = {
        f.name: OptionField(f.name, hints[f.name], f.default, f.metadata["option"])
        for f in dataclasses.fields(kind)
    }
    own = [name for name in found if name in kind.__annotations__]
    return {name: found[name] for name in (*own, *(n for n in found if n not in own))}


def aliases(kind: OptionSetType) -> dict[str, str]:
    """Return a mapping from aliases to names of fields."""
    return {other: f.name for f in fields(kind).values() for other in f.option.aliases}


def toml_names(kind: OptionSetType) -> list[str]:
    """Return the names of the fields that are TOML keys."""
    return [known.name for known in fields(kind).values() if known.option.toml]


# ---- values ---------------------------------------------------------------------------------


def _union(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def accepts(hint: Any, value: Any) -> bool:
    """Return True if a value has the type of an annotation; NumPy scalars are numbers."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(accepts(kind, value) for kind in args)
    if origin is Literal:
        return any(type(value) is type(item) and value == item for item in args)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if origin is not None and issubclass(origin, Sequence):
        if not isinstance(value, (list, tuple)):
            return False
        return set(map(type, value)) <= {args[0]} or all(accepts(args[0], item) for item in value)
    if hint in (Any, object):
        return True
    if isinstance(value, bool):
        return hint is bool
    if hint is int:
        return isinstance(value, numbers.Integral)
    if hint is float:
        is_whole = isinstance(value, numbers.Integral)  # math.isnan cannot take any whole number
        return is_whole or (isinstance(value, numbers.Real) and not math.isnan(value))
    return isinstance(value, hint)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def describe(hint: Any) -> str:
    """Return a description of a type for messages."""
    found = []
    for kind in _union(hint):
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is Literal:
            found.append(" or ".join(map(repr, args)))
        elif origin is not None and issubclass(origin, Mapping):
            found.append("an object")
        elif origin is not None and issubclass(origin, Sequence):
            items = [_PLURALS.get(item, "lists") for item in _union(args[0]) if item is not bool]
            found.append(f"a list of {' or '.join(items)}")
        else:
            found.append(_WORDS.get(kind, getattr(kind, "__name__", str(kind))))
    return " or ".join(found)


def describe_bounds(low: float | None, high: float | None, above: bool = False) -> str:
    """Return a description of bounds for messages."""
    if low is None:
        return f"at most {_shown(high)}"
    if high is None:
        return f"{'greater than' if above else 'at least'} {_shown(low)}"
    if above:
        return f"greater than {_shown(low)} and at most {_shown(high)}"
    return f"in {_shown(low)}..{_shown(high)}"


def _shown(value: float | None) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def size_bytes(value: int | str, name: str = "size") -> int:
    """Convert a size such as "2GiB" to bytes, at least 1."""
    match = _SIZE.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    if match is None:
        raise UsageError(
            f"{name} must be a number of bytes such as 1000000 or '2GiB', got {value!r:.60}"
        )
    unit = _UNITS[(match[2] or "").lower()]
    n = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if not 1 <= n <= 2**60:
        raise UsageError(f"{name} must be in 1..{2**60}, got {value!s:.60}")
    return n


# ---- descriptions ---------------------------------------------------------------------------


def json_schema(known: OptionField) -> dict[str, Any]:
    """Return the JSON schema of a field in HTTP requests."""
    high = known.option.high if known.option.http_high is None else known.option.http_high
    low_key = "exclusiveMinimum" if known.option.above else "minimum"
    bounds = {low_key: known.option.low, "maximum": high}
    kinds = [_schema(kind, bounds) for kind in _union(known.outside_hint)]
    schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    return {**schema, "description": known.option.help}


def _schema(hint: Any, bounds: Mapping[str, float | None] = types.MappingProxyType({})) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(kind) for kind in args]}
    if origin is not None and issubclass(origin, Mapping):
        values = {} if args[1] is Any else {"additionalProperties": _schema(args[1])}
        return {"type": "object", **values}
    if origin is not None and issubclass(origin, Sequence):
        return {"type": "array", "items": _schema(args[0])}
    kind = {bool: "boolean", int: "integer", float: "number"}.get(hint, "string")
    kept = {k: v for k, v in bounds.items() if v is not None} if hint in (int, float) else {}
    return {"type": kind, **kept}


def default_text(known: OptionField) -> str:
    """Return the default of a field as text; empty for None and False."""
    if known.option.shown:
        return known.option.shown
    if known.default is None or known.default is False or known.default == ():
        return ""
    return f"{known.default:g}" if isinstance(known.default, float) else str(known.default)


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def documents(kind: OptionSetType) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that documents ``**options`` of a function or class by an option set.

    The fields become part of its signature and replace the line ``{options}`` of its docstring.
    """

    def wrap(function: FunctionT) -> FunctionT:
        is_class = inspect.isclass(function)
        signature = inspect.signature(function.__init__ if is_class else function)
        kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD][is_class:]
        names = {p.name for p in kept}
        more = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default)
            for f in fields(kind).values()
            if f.name not in names
        ]
        typing.cast(Any, function).__signature__ = signature.replace(parameters=[*kept, *more])
        function.__doc__ = (function.__doc__ or "").replace("{options}", _entries(kind))
        return function

    return wrap


def _entries(kind: OptionSetType) -> str:
    """Return the entries of a NumPy-style section, indented for a module-level function."""
    lines = []
    for known in fields(kind).values():
        optional = "optional" if known.default is None else f"default {known.default!r}"
        choices = ", ".join(map(repr, known.choices))
        names = [getattr(hint, "__name__", "value") for hint in _union(known.outside_hint)]
        lines.append(
            f"{known.name} : {f'{{{choices}}}' if choices else ' or '.join(names)}, {optional}"
        )
        text = f"{known.option.help[:1].upper()}{known.option.help[1:]}".rstrip(".")
        lines += textwrap.wrap(
            f"{text}. {known.option.more}", 92, initial_indent=4 * " ", subsequent_indent=4 * " "
        )
    return "\n    ".join(lines)
