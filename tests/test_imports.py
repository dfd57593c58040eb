"""No module of the packages and no script of tools/ is part of an import cycle.

Imports within functions and under ``TYPE_CHECKING`` count: a cycle that only shows there still
means that two modules cannot be understood, tested or moved one without the other.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "nbflow": ".",
    "nbflow_kernels": "kernels",
    "nbflow_ptx": "kernels",
    "nbflow_experiments": "experiments",
}
SCRIPTS = [ROOT / "tools" / name for name in ("checkpoints", "docs", "golden", "measure")]


def modules() -> dict[str, Path]:
    """Return the files of the packages by module."""
    files = {}
    for package, folder in PACKAGES.items():
        for file in (ROOT / folder / package).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            files[".".join(parts).removesuffix(".__init__")] = file
    return files


def parents(module: str) -> set[str]:
    """Return the packages around a module, whose ``__init__`` runs before it."""
    parts = module.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts))}


def imports(files: dict[str, Path]) -> dict[str, set[str]]:
    """Return the modules that each module imports, of those given."""
    found: dict[str, set[str]] = {}
    for module, file in files.items():
        names = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    names.add(inner if inner in files else node.module)
        names |= {parent for name in names for parent in parents(name)} - parents(module)
        found[module] = {name for name in names if name in files and name != module}
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one module."""
    order: list[str] = []
    seen: set[str] = set()
    for start in graph:
        stack = [(start, iter(graph[start]))] if start not in seen else []
        seen.add(start)
        while stack:
            module, left = stack[-1]
            following = next((m for m in left if m not in seen), None)
            if following is None:
                order.append(module)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(graph[following])))
    importers: dict[str, set[str]] = {module: set() for module in graph}
    for module, names in graph.items():
        for name in names:
            importers[name].add(module)
    found, done = [], set[str]()
    for start in reversed(order):
        group, left_over = [], [start]
        while left_over:
            module = left_over.pop()
            if module not in done:
                done.add(module)
                group.append(module)
                left_over += importers[module]
        if len(group) > 1:
            found.append(sorted(group))
    return found


def test_cycles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"a"}}
    assert cycles(graph) == [["a", "b", "c"]]


def check(graph: dict[str, set[str]]) -> None:
    found = cycles(graph)
    assert not found, f"import cycles: {'; '.join(' -> '.join(group) for group in found)}"


def test_no_module_is_in_a_cycle():
    graph = imports(modules())
    assert "nbflow.engine.core" in graph["nbflow.engine.llm_engine"]
    assert "nbflow_ptx.machine.machine" in graph["nbflow_ptx.instructions.binder"]
    check(graph)


@pytest.mark.parametrize("folder", SCRIPTS, ids=lambda folder: folder.name)
def test_no_script_is_in_a_cycle(folder: Path):
    """Scripts of a folder import each other by their bare names."""
    check(imports({file.stem: file for file in folder.glob("*.py")}))


def test_the_folders_of_scripts_are_known():
    assert {file.parent for file in (ROOT / "tools").rglob("*.py")} == set(SCRIPTS)
