"""Sweep file: definition of the points of a sweep.

A sweep is a TOML file::

    [sweep]
    name = "bits"                       # name of the results folder
    description = "bits against error"
    seed = 0                            # choice of the evaluated windows
    measures = ["weight_error", "perplexity", "decode"]

    plugins = ["my_format.py"]          # Python that registers parts of your own: it is imported

    [settings]                          # the same for every point
    model = "tiny_python"
    prompt = 128

    [axes]                              # the points are the product of the axes
    weights = ["f32", "q8", "q4"]
    batch = "1..4"                      # 1 2 3 4
    decode = {start = 16, stop = 64, factor = 2}          # 16 32 64

    [[zip]]                             # settings that vary together: one axis
    kv = ["f16", "q8"]
    max_context = [256, 512]

    [[exclude]]                         # no point that matches every line
    weights = "f32"
    batch = [3, 4]                      # any of these

Settings and axes have the names of `nbflow_experiments.settings.SETTINGS`; a setting that is
neither fixed nor varied has its default.  Ranges (`nbflow_experiments.config.ranges`) include both
ends and may stand inside lists: ``[1, "4..6"]``.  An `exclude` that matches no point is an error,
except where the sweep was narrowed on the command line.  Unknown sections, settings, axes, measures
and formats are errors.  Grids of Weights & Biases in YAML or JSON are read as well
(`nbflow_experiments.config.wandb_grid`).
"""

from __future__ import annotations

import itertools
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nbflow_experiments.config.command_line_axes import apply_lists
from nbflow_experiments.config.ranges import expand_range
from nbflow_experiments.config.wandb_grid import from_wandb, is_wandb
from nbflow_experiments.measures import MEASURES, check_used
from nbflow_experiments.optional_packages import require
from nbflow_experiments.settings import (
    SETTINGS,
    Value,
    check_configuration,
    check_value,
    resolve_words,
    setting,
)
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.plugins import load_plugins

_SECTIONS = ("sweep", "settings", "axes", "zip", "exclude")
_SWEEP_KEYS = ("name", "description", "seed", "measures", "plugins")
_Bundle = list[dict[str, Value]]
SUFFIXES = (".toml", ".yaml", ".yml", ".json")
"""Suffixes of sweep files."""
_MOST_BYTES = 2**22  # a sweep is written by hand
_MOST_POINTS = 10**6  # at 10 s each, four months


@dataclass(frozen=True)
class Sweep:
    """Sweep with its expanded points."""

    name: str
    description: str
    measures: tuple[str, ...]
    """Names of the measures, in the order in which they run."""
    factors: tuple[str, ...]
    """Settings that vary, in the order of the file."""
    points: tuple[dict[str, Value], ...]
    """Configuration of each point: every setting, resolved."""
    excluded: int
    """Number of points of the product that were excluded."""
    folder: Path
    """Folder of the sweep file, base of its relative paths."""
    plugins: tuple[str, ...] = ()
    """Plugins, which every rank imports: absolute paths, or names of installed ones."""


SPEED = ("prefill", "decode", "memory")
"""Measures of a sweep without a file."""


def load_sweep(
    path: str | Path,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    lists: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Sweep:
    """Read a sweep file.

    Parameters
    ----------
    path : str or Path
        The file: TOML, or a grid of Weights & Biases in YAML or JSON
        (`nbflow_experiments.config.wandb_grid`).
    overrides : sequence of str
        Replacements ``section.name=value``, value in TOML (``axes.batch=[1,2]``).
    plugins : sequence of str
        Plugins to import, besides those the file names.
    lists : mapping
        Settings of the command line, which replace the file's: name -> texts
        (`nbflow_experiments.config.command_line_axes`).
    """
    path = Path(path)
    data = read_sweep_file(path)
    for override in overrides:
        apply_override(data, override)
    apply_lists(data, lists)
    narrowed = bool(overrides or lists)
    sweep = parse_sweep(
        data, path.parent, default_name=path.stem, narrowed=narrowed, plugins=plugins
    )
    check_used(lists, sweep.measures)
    return sweep


def sweep_of_lists(
    lists: Mapping[str, Sequence[str]], overrides: Sequence[str] = (), plugins: Sequence[str] = ()
) -> Sweep:
    """Return the sweep that command-line settings define, without a file.

    Parameters are those of `load_sweep`; `lists` must contain the model, which names the sweep.
    The default measures are llama-bench's (`SPEED`).
    """
    data: dict[str, Any] = {"sweep": {"measures": list(SPEED)}}
    for override in overrides:
        apply_override(data, override)
    apply_lists(data, lists)
    model = str(data["settings"].get("model", ""))
    name = re.sub(r"[^\w.-]+", "-", Path(model).stem).strip("-.") or "sweep"
    sweep = parse_sweep(data, Path(), default_name=name, narrowed=True, plugins=plugins)
    check_used(lists, sweep.measures)
    return sweep


def apply_override(data: dict[str, Any], text: str) -> None:
    """Replace one value of the parsed file; `text` is ``section.name=value`` (TOML or a word)."""
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot or not name:
        raise UsageError(
            f"--set must be section.name=value, for example axes.batch=[1,2]; got {text!r}"
        )
    if section not in ("sweep", "settings", "axes"):
        raise unknown_name("section in --set", section, ("sweep", "settings", "axes"))
    try:
        parsed: object = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError) as error:
        if not re.fullmatch(r"[\w./&;-]+", value.strip()):
            raise UsageError(f"--set {text!r}: the value is not valid TOML: {error}") from None
        parsed = value.strip()
    table = data.setdefault(section, {})
    if isinstance(table, dict):
        table[name] = parsed


def parse_sweep(
    data: Mapping[str, Any],
    folder: Path,
    *,
    default_name: str,
    narrowed: bool = False,
    plugins: Sequence[str] = (),
) -> Sweep:
    """Return the sweep that the parsed file `data` describes; see `load_sweep`."""
    _check_keys(data, "section of the sweep file", _SECTIONS)
    head = _table(data, "sweep")
    _check_keys(head, "entry of [sweep]", _SWEEP_KEYS)
    sources = (*_plugins(head.get("plugins", []), folder), *_absolute(plugins, Path()))
    load_plugins(sources)  # before names of formats and measures are checked
    name = _name(head.get("name", default_name))
    description = head.get("description", "")
    if not isinstance(description, str):
        raise UsageError(f"[sweep]: description must be text, got {description!r}")
    measures = _measures(head.get("measures", [m.name for m in MEASURES.values() if m.by_default]))
    fixed, bundles = _fixed(data, head), _bundles(data)
    factors = [key for bundle in bundles for key in bundle[0]]
    for i, factor in enumerate(factors):
        if factor in fixed or factor in factors[:i]:
            raise UsageError(
                f"{factor} is given twice: it can be fixed, an axis, or part of one [[zip]]"
            )
    n_points = math.prod(map(len, bundles))
    if n_points > _MOST_POINTS:
        raise UsageError(
            f"the axes have {n_points} points; a sweep has at most {_MOST_POINTS}: shorten axes"
        )
    base = {s.name: s.default for s in SETTINGS.values()} | fixed
    product = [_merge(base, parts) for parts in itertools.product(*bundles)]
    for config in product:
        resolve_words(config)
    points = _without(product, _excludes(data), narrowed)
    for config in points:
        check_configuration(config)
    excluded = n_points - len(points)
    return Sweep(
        name, description, measures, tuple(factors), tuple(points), excluded, folder, sources
    )


def _check_keys(table: Mapping[str, Any], what: str, known: Sequence[str]) -> None:
    """Raise for a key that is not known."""
    for key in table:
        if key not in known:
            raise unknown_name(what, key, known)


def _fixed(data: Mapping[str, Any], head: Mapping[str, Any]) -> dict[str, Value]:
    """Return the checked settings that are the same for every point."""
    settings = _table(data, "settings")
    fixed = {k: check_value(setting(k).name, v, "[settings]") for k, v in settings.items()}
    if "seed" in head:
        if "seed" in fixed:
            raise UsageError("seed is given twice, in [sweep] and in [settings]; keep one")
        fixed["seed"] = check_value("seed", head["seed"], "[sweep]")
    return fixed


def _table(data: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Return a section that must be a table; absent is empty."""
    table = data.get(section, {})
    if not isinstance(table, dict):
        raise UsageError(f"[{section}] must be a table, got {table!r}")
    return table


def _groups(data: Mapping[str, Any], section: str) -> list[dict[str, Any]]:
    """Return a section that must be an array of non-empty tables; absent is empty."""
    groups = data.get(section, [])
    if not isinstance(groups, list) or not all(isinstance(g, dict) and g for g in groups):
        raise UsageError(f"write [[{section}]] (two brackets) with at least one line below it")
    return groups


def _name(name: object) -> str:
    """Return the sweep's name; it must be valid as a folder name."""
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
        raise UsageError(f"[sweep]: name must be letters, digits, '-', '_' and '.', got {name!r}")
    return name


def _plugins(given: object, folder: Path) -> list[str]:
    """Return the plugins of a sweep file, relative paths from its folder."""
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise UsageError(f"[sweep]: plugins must be a list of file names, got {given!r}")
    return _absolute(given, folder)


def _absolute(plugins: Sequence[str], folder: Path) -> list[str]:
    """Return plugins with absolute paths; names of installed ones stay."""
    return [str((folder / p).absolute()) if str(p).endswith(".py") else str(p) for p in plugins]


def _measures(names: object) -> tuple[str, ...]:
    """Return the checked names of the measures, in the order in which they run."""
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise UsageError(f"[sweep]: measures must be a list of names, got {names!r:.200}")
    for name in names:
        if name not in MEASURES:
            raise unknown_name("measure", name, MEASURES)
    return tuple(name for name in MEASURES if name in names)


def _bundles(data: Mapping[str, Any]) -> list[_Bundle]:
    """Return the axes, each a list of assignments."""
    bundles: list[_Bundle] = []
    for name, values in _table(data, "axes").items():
        bundles.append([{name: value} for value in expand_axis(name, values, "[axes]")])
    for group in _groups(data, "zip"):
        columns = {k: expand_axis(k, v, "[[zip]]") for k, v in group.items()}
        lengths = {k: len(v) for k, v in columns.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{k}: {n}" for k, n in lengths.items())
            raise UsageError(f"[[zip]]: the lists must be equally long, got {found}")
        rows = zip(*columns.values(), strict=True)
        bundles.append([dict(zip(columns, row, strict=True)) for row in rows])
    return bundles


def expand_axis(name: str, values: object, where: str) -> list[Value]:
    """Expand the values of an axis: a list, a range, or a list that contains ranges."""
    known = setting(name, "axis")
    items = values if isinstance(values, list) else [values]
    if not isinstance(values, list) and not (known.is_integer and isinstance(values, str | dict)):
        raise UsageError(f"{where}: {name} must be a list or a range, got {values!r}")
    written: list[object] = []
    for item in items:
        if known.is_integer and isinstance(item, str | dict) and item not in known.words:
            written += expand_range(name, item, where)
        else:
            written.append(item)
    result = [check_value(name, value, where) for value in written]
    if not result:
        raise UsageError(f"{where}: {name} has no values")
    repeated = [v for v, n in Counter(result).items() if n > 1]
    if repeated and where == "[axes]":
        raise UsageError(f"{where}: {name} has {sorted(map(str, repeated))} more than once")
    return result


def _excludes(data: Mapping[str, Any]) -> list[dict[str, list[Value]]]:
    """Return the checked rules: setting -> values, all of which must match."""
    rules = []
    for group in _groups(data, "exclude"):
        rule = {}
        for key, values in group.items():
            name = setting(key, "setting in [[exclude]]").name
            items = values if isinstance(values, list) else [values]
            rule[name] = [check_value(name, item, "[[exclude]]") for item in items]
        rules.append(rule)
    return rules


def _without(
    points: list[dict[str, Value]], rules: list[dict[str, list[Value]]], narrowed: bool
) -> list[dict[str, Value]]:
    """Return the points that match no rule."""
    for rule in rules:
        if not narrowed and not any(_matches(point, rule) for point in points):
            raise UsageError(f"[[exclude]] {rule} matches no point; correct or remove it")
    kept = [point for point in points if not any(_matches(point, rule) for rule in rules)]
    if not kept:
        raise UsageError("the sweep has no points: everything is excluded")
    return kept


def _matches(point: Mapping[str, Value], rule: Mapping[str, list[Value]]) -> bool:
    """Return whether every line of a rule holds for a point."""
    return all(point[name] in values for name, values in rule.items())


def _merge(base: Mapping[str, Value], parts: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """Return a point's configuration from the base and one assignment per axis."""
    config = dict(base)
    for part in parts:
        config |= part
    return config


def is_sweep_file(text: str) -> bool:
    """Return whether a command-line argument names a sweep file rather than a model."""
    return text.lower().endswith(SUFFIXES) and not Path(text).is_dir()


def read_sweep_file(path: Path) -> dict[str, Any]:
    """Read a sweep file of any type as a parsed TOML one."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} has {path.stat().st_size} bytes; a sweep file has at most 4M")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the sweep file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file in UTF-8") from None
    data = _parse(path, text)
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold a table, got {type(data).__name__}")
    return from_wandb(data, path) if is_wandb(data) else data


def _parse(path: Path, text: str) -> Any:
    """Parse the text by the file's suffix."""
    suffix = path.suffix.lower()
    if suffix in (".yaml", ".yml"):
        yaml = require("yaml")
        try:
            return yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not valid YAML: {error}") from None
    is_json = suffix == ".json"
    try:
        return json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if is_json else "TOML"
        raise UsageError(f"{path} is not valid {kind}: {error}") from None
