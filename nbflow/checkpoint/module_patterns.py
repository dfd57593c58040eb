"""Patterns of module names with which configurations give settings to some modules.

==================  ==========================================================================
quant_method        pattern
==================  ==========================================================================
gptq (dynamic)      regular expression at the start of the name, after ``+:`` or ``-:``
compressed-tensors  the name, ``re:`` and a regular expression at its start, or a class
quark               shell pattern of the whole name
modelopt            the name
==================  ==========================================================================

Modules that are not quantized are listed in the same ways, those of transformers by beginnings and
ends of names (`left_out`).

Sources: transformers 5.24 (quantizers/quantizers_utils.py), GPTQModel 7.7 (quantization/config.py),
compressed-tensors 0.20 (utils/match.py), Quark 0.13 (quant_config_parser.py), ModelOpt 0.47
(convert_hf_config.py).
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError

_MOST = 1000
"""Characters of a pattern."""
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPETITION = re.compile(r"[*+}]")
_OPTIONAL = re.compile(r"(?<![(*+}])\?")  # not of a group's kind, nor "as few as possible"
_MOST_WAYS = 10**7
LONGEST_NAME = 200
"""Characters of a name that is matched; released models have names of less than 100."""
EVERY = re.compile("")


def regular(text: Any, at: str) -> re.Pattern[str]:
    r"""Compile a regular expression from a file, to be matched at the start of a name.

    The file writes the names, too, so the ways in which a pattern may match one are bounded: about
    100 for each repetition, 2 for each optional item, and the alternatives of each group, all
    multiplied.  Repeated groups, whose ways are exponential, are refused.

    Examples
    --------
    >>> bool(regular(r".*\.mlp\.(up|down)_proj", "dynamic").match("layers.0.mlp.up_proj"))
    True
    """
    if not isinstance(text, str) or len(text) > _MOST:
        raise UsageError(f"{at} must be a pattern of at most {_MOST} characters, got {shown(text)}")
    ways = 100 ** len(_REPETITION.findall(text)) * 2 ** len(_OPTIONAL.findall(text))
    ways *= math.prod(1 + part.count("|") for part in text.split(")"))
    if _REPEATED_GROUP.search(text) or ways > _MOST_WAYS:
        raise UsageError(
            f"{at}: a pattern with repeated groups, or with so many repetitions and alternatives, "
            f"may take too long to match, got {shown(text)}; write it as several patterns"
        )
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(
            f"{at} must be a regular expression, got {shown(text)}: {error}"
        ) from error


def exact(name: str) -> re.Pattern[str]:
    """Return the pattern of one name."""
    return re.compile(re.escape(name) + r"\Z")


def shell(text: Any, at: str) -> re.Pattern[str]:
    """Return a shell pattern of whole names."""
    if not isinstance(text, str) or len(text) > _MOST:
        raise UsageError(f"{at} must be a pattern of at most {_MOST} characters, got {shown(text)}")
    return re.compile(fnmatch.translate(text))


def target(text: Any, at: str) -> tuple[int, str, re.Pattern[str]]:
    """Return rank, text and pattern of a target of compressed-tensors; low ones come first.

    Names come before regular expressions, and these before classes, each in the order of letters.
    The class of a module is not known here: one stands for every module, and the tensors show
    which are quantized.
    """
    if not isinstance(text, str):
        raise UsageError(f"{at} must be names, got {shown(text)}")
    if text.startswith("re:"):
        return 1, text, regular(text.removeprefix("re:"), at)
    if text.isidentifier() and text[0].isupper():
        return 2, text, EVERY
    return 0, text, exact(text)


@dataclass(frozen=True)
class ModuleNames:
    """Set of module names, some by their parts."""

    whole: frozenset[str] = frozenset()
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    """Texts anywhere in a name."""
    patterns: tuple[re.Pattern[str], ...] = ()
    only_ends: tuple[str, ...] = ()
    """If there are any, names with other ends belong to the set."""

    def __contains__(self, name: str) -> bool:
        return (
            name in self.whole
            or name.startswith(self.starts)
            or name.endswith(self.ends)
            or (bool(self.only_ends) and not name.endswith(self.only_ends))
            or any(part in name for part in self.parts)
            or any(pattern.match(name) for pattern in self.patterns)
        )


NONE = ModuleNames()
"""The empty set."""
_LISTS = ("modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers", "skip_modules")
"""Keys with the modules that transformers and vLLM leave as they are."""


def left_out(method: str, table: Mapping[str, Any], at: str) -> ModuleNames:
    """Return the modules that a configuration leaves as floats.

    The tensors of a checkpoint show them, too; plans from config.json alone need the names.

    Examples
    --------
    >>> names = left_out("fp8", {"modules_to_not_convert": ["lm_head", "mlp.gate"]}, "config")
    >>> ["model.layers.0.mlp.gate" in names, "model.layers.0.mlp.gate_proj" in names]
    [True, False]
    """
    if method == "gptq":
        inner = table.get("modules_in_block_to_quantize") or []
        flat = [x for each in inner for x in (each if isinstance(each, list) else [each])]
        return ModuleNames(only_ends=tuple(map(str, flat)))
    if method == "compressed-tensors":
        targets = [target(text, f"{at}.ignore") for text in _texts(table, ["ignore"], at)]
        patterns = (pattern for rank, _, pattern in targets if rank < 2)  # no classes
        return ModuleNames(patterns=tuple(patterns))
    if method in ("modelopt", "quark"):
        texts = _texts(table, ["ignore", "exclude_modules", "exclude"], at)
        plain = frozenset(text for text in texts if not any(c in text for c in "*?["))
        return ModuleNames(plain, patterns=tuple(shell(t, at) for t in texts if t not in plain))
    names = tuple(_texts(table, _LISTS, at))
    return ModuleNames(parts=names) if method == "awq" else ModuleNames(starts=names, ends=names)


def _texts(table: Mapping[str, Any], keys: Iterable[str], at: str) -> list[str]:
    """Return the texts of lists in a table."""
    found: list[str] = []
    for key in keys:
        value = table.get(key) or []
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UsageError(f"{at}.{key} must be a list of module names, got {shown(value)}")
        found += filter(None, texts)
    return found
