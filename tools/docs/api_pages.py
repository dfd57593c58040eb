"""Python API pages, generated from signatures and NumPy-style docstrings."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from nbflow_kernels.errors import MissingExtraError

FIELDS = ("Parameters", "Other Parameters", "Returns", "Yields", "Raises", "Warns", "Attributes")
"""Sections that hold entries: ``name : type`` and an indented description."""

ABOUT = {
    "nbflow": "Models, engines and files: what `import nbflow` offers.",
    "nbflow_kernels": "Arrays in, arrays out: what `import nbflow_kernels as nk` offers.",
    "nbflow_experiments": "Sweeps, measures, scores and analysis, by package.",
    "nbflow_ptx": "CUDA kernels on the CPU: what `import nbflow_ptx` offers.",
}
ROOMS = ("analysis", "compare", "scoring", "store", "report", "measures", "config", "sweep")
"""Packages of `nbflow_experiments`, which exports nothing itself."""


def api_page(package: str) -> str:
    """Return the page of a package's public names."""
    module = importlib.import_module(package)
    lines = [f"# {package}", "", ABOUT[package], ""]
    for title, names in _groups(package, module):
        lines += [f"## {title}", ""] if title else []
        for name in names:
            lines += _entry(name, getattr(module, name), level=3 if title else 2)
    if package == "nbflow_experiments":
        for room in ROOMS:
            lines += _room(importlib.import_module(f"{package}.{room}"))
    return "\n".join(lines)


def _room(package: Any) -> list[str]:
    """Return the section of a package: its `__all__`, or the public names of its modules."""
    listed = [
        name for name in getattr(package, "__all__", ()) if name.islower() or name[0].isupper()
    ]
    found = {name: getattr(package, name) for name in listed}
    found = {name: value for name, value in found.items() if callable(value)}
    modules = () if found else pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    for info in modules:
        try:
            module = importlib.import_module(info.name)
        except MissingExtraError:  # lm-evaluation-harness, which the site does not need
            continue
        for name, value in vars(module).items():
            own = getattr(value, "__module__", "") == module.__name__
            if own and not name.startswith("_") and name != "run" and inspect.getdoc(value):
                found[name] = value
    lines = [f"## {package.__name__}", "", *_prose(inspect.getdoc(package) or ""), ""]
    for name, value in sorted(found.items()):
        lines += _entry(name, value, level=3)
    return lines


def _groups(package: str, module: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the public names, the kernels' by family."""
    names = [n for n in getattr(module, "__all__", ()) if not n.startswith("__")]
    names = [n for n in names if not inspect.ismodule(getattr(module, n))]
    if package == "nbflow_kernels":
        from nbflow_kernels.op_registry import FAMILIES

        for family, members in FAMILIES.items():
            yield family, list(members)
        listed = {name for members in FAMILIES.values() for name in members}
        yield "formats and the rest", [n for n in names if n not in listed]
    else:
        yield "", names


def _entry(name: str, value: Any, level: int) -> list[str]:
    """Return the section of a public name."""
    lines = [f"{'#' * level} {name}", ""]
    if not callable(value):
        size = f" with {len(value)} entries" if hasattr(value, "__len__") else ""
        return [*lines, f"A {type(value).__name__}{size}.", ""]
    lines += [*_code(_signature(name, value)), *_docstring(value), ""]
    if inspect.isclass(value):
        lines += _fields(value)
        for member, method in _methods(value):
            is_property = isinstance(method, property)
            lines += [f"{'#' * (level + 1)} {name}.{member}", ""]
            lines += ["*property*", ""] if is_property else _code(_signature(member, method))
            lines += [*_docstring(method), ""]
    return lines


def _code(text: str) -> list[str]:
    return ["```python", text, "```", ""]


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield public methods and properties that have a docstring."""
    if issubclass(kind, BaseException):
        return
    for name, member in vars(kind).items():
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        is_method = inspect.isfunction(member) or isinstance(member, property)
        if is_method and not name.startswith("_") and inspect.getdoc(member):
            yield name, member


def _signature(name: str, value: Any) -> str:
    """Return the call signature, one parameter per line if long."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return f"{name}(...)"
    parameters = [
        p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
    ]
    parameters = [p for p in parameters if p.name not in ("self", "cls")]
    short = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    if len(name + short) <= 88:
        return name + short
    words = re.findall(r"(?:[^,(\[{]|\([^()]*\)|\[[^\]]*\]|\{[^}]*\})+", short[1:-1])
    return f"{name}(\n" + "".join(f"    {word.strip()},\n" for word in words) + ")"


def _docstring(value: Any) -> list[str]:
    """Return a NumPy-style docstring as Markdown."""
    text = inspect.getdoc(value) or ""
    parts = re.split(r"^(\w[\w ]*)\n-{3,}\n", text, flags=re.M)
    lines = _prose(parts[0])
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        lines += ["", f"**{title}**", ""]
        if title in FIELDS:
            lines += _items(body)
        elif title == "Examples":
            lines += ["```pycon", body.strip("\n"), "```"]
        else:
            lines += _prose(body)
    return lines


def _items(body: str) -> list[str]:
    """Return the entries of a section as a list."""
    lines = []
    for entry in re.split(r"^(?=\S)", body.strip("\n"), flags=re.M):
        head, _, about = entry.partition("\n")
        if head:
            name, _, kind = head.partition(" : ")
            kind = f" : {_inline(kind)}" if kind else ""
            lines += [f"- **`{name.strip()}`**{kind}", ""]
            lines += [f"    {line}".rstrip() for line in _prose(textwrap.dedent(about))] + [""]
    return lines


def _prose(text: str) -> list[str]:
    """Convert docstring reStructuredText to Markdown."""
    lines, block = [], False
    for line in text.strip("\n").split("\n"):
        math = line.startswith(".. math::")
        if block and line.strip() and not line.startswith(" "):
            block = False
            lines += ["```", ""]
        if math:
            block = True
            lines += ["", "```text", line.removeprefix(".. math::").strip()]
        else:
            lines.append(line if block else _inline(line))
    return [*lines, "```"] if block else lines


def _inline(line: str) -> str:
    """Convert inline code to Markdown and escape HTML and emphasis."""
    line = line.replace("``", "`")
    pieces = re.split(r"(`[^`]*`)", line)
    return "".join(p if p.startswith("`") else re.sub(r"([<*_])", r"\\\1", p) for p in pieces)


def _fields(kind: type) -> list[str]:
    """Return the fields of a dataclass with their docstrings."""
    if not dataclasses.is_dataclass(kind):
        return []
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    lines = []
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        about = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            about = " ".join(str(after.value.value).split())
        if not node.target.id.startswith("_"):
            kind_text = ast.unparse(node.annotation)
            lines += [f"- **`{node.target.id}`** : `{kind_text}`", "", f"    {_inline(about)}", ""]
    return ["**Fields**", "", *lines] if lines else []
