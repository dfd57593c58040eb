"""Settings on the command line, as llama-bench takes them: ``-p 128,256 -b 1-8*2``.

An option holds one value or a list; integers may be ranges (`nbflow_experiments.config.ranges`).
An option replaces the sweep file's entry for that setting: one value fixes it, several are an axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbflow_experiments.config.ranges import expand_range, is_range
from nbflow_experiments.settings import Value, setting
from nbflow_kernels.errors import UsageError


def parse_list(name: str, texts: Sequence[str]) -> list[Value]:
    """Parse the values of a setting's option, which may be repeated.

    Examples
    --------
    >>> parse_list("batch", ["1,4-8+2", "16-64*2"])
    [1, 4, 6, 8, 16, 32, 64]
    >>> parse_list("partition", ["0,0;1"])
    ['0', '0;1']
    """
    known, values = setting(name), list[Value]()
    for part in (part.strip() for text in texts for part in text.split(",")):
        if not known.is_number or part in known.words:
            values.append(part)
        elif known.is_integer and is_range(part):
            values += expand_range(name, part, f"--{name}")
        else:
            values.append(_number(name, part, int if known.is_integer else float))
    return values


def _number(name: str, text: str, kind: type[int] | type[float]) -> Value:
    try:
        return kind(text)
    except ValueError:
        what = "an integer or a range like 16-128*2" if kind is int else "a number"
        raise UsageError(f"--{name} must be {what}, got {text!r}") from None


def apply_lists(data: dict[str, Any], lists: Mapping[str, Sequence[str]]) -> None:
    """Apply command-line settings to a parsed sweep file."""
    fixed, axes = data.setdefault("settings", {}), data.setdefault("axes", {})
    groups = data.get("zip", [])
    if not (isinstance(fixed, dict) and isinstance(axes, dict) and isinstance(groups, list)):
        return  # parse_sweep reports the error
    for name, texts in lists.items():
        values = parse_list(name, texts)
        if name == "eval_text":  # relative to the working directory
            values = [str(Path(str(v)).absolute()) if v else v for v in values]
        for group in groups:
            if isinstance(group, dict) and name in group:
                raise UsageError(
                    f"--{name}: {name} varies together with others in a [[zip]] of the sweep file; "
                    f"change it there"
                )
        if name == "seed":
            data.get("sweep", {}).pop("seed", None)
        fixed.pop(name, None)
        if len(values) == 1:
            axes.pop(name, None)
            fixed[name] = values[0]
        else:
            axes[name] = values
