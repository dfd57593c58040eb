"""Every family's cases, and what holds for every public op."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels import op_registry
from nbflow_kernels.cpu import parallel_for
from nbflow_kernels.op_case import OpCase
from nbflow_kernels.testing import checks, tolerances

# Shapes of real models are the benchmark's; it checks them before it times them.
CASES = [case for case in op_registry.all_cases() if not case.timed]
OPS = [(family, op) for family, ops in op_registry.FAMILIES.items() for op in ops]
FUNCTIONS = [(family, op) for family, op in OPS if inspect.isfunction(getattr(nk, op))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case_equals_reference(case: OpCase) -> None:
    assert checks.check(case) <= 1.0


def _bits(case: OpCase) -> list[bytes]:
    done = checks.run(case)
    changed = [done["arguments"][name] for name in case.mutates]
    return [np.asarray(leaf).tobytes() for leaf in checks.leaves([done["result"], changed])]


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case_is_bitwise_the_same_again_and_with_two_threads(case: OpCase) -> None:
    parallel_for.set_num_threads(1)
    first, again = _bits(case), _bits(case)
    parallel_for.set_num_threads(2)
    assert first == again
    assert first == _bits(case)


@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_only_listed_ops_compute_in_numpy(op: str) -> None:
    case = next(case for case in CASES if case.op == op)
    with parallel_for.kernel_seconds() as seconds:
        checks.run(case)
    in_numpy = op in op_registry.NUMPY_ON_CPU or op in op_registry.NO_CUDA  # the latter make tables
    assert bool(seconds) != in_numpy


@pytest.mark.parametrize(("family", "op"), FUNCTIONS)
def test_op_has_reference_and_case(family: str, op: str) -> None:
    public = inspect.signature(getattr(nk, op)).parameters
    reference = inspect.signature(getattr(op_registry.load(family, "reference"), op)).parameters
    named = [name for name, p in reference.items() if p.kind is not p.VAR_KEYWORD]
    assert [name for name in named if name not in public] == []
    if len(named) == len(reference):  # else it hands the rest on to another reference
        # `out` and `lse` say where the result goes, which is nothing to a reference
        assert [name for name in public if name not in (*named, "out", "lse")] == []
    assert op in {case.op for case in op_registry.load(family, "cases").CASES}


@pytest.mark.parametrize(("family", "op"), OPS)
def test_op_has_docstring_with_example_and_variants(family: str, op: str) -> None:
    public = getattr(nk, op)
    examples = doctest.DocTestFinder(recurse=True).find(public, op)
    assert any(test.examples for test in examples), f"{op} has no example"
    modules = (f"nbflow_kernels.{family}", "nbflow_kernels.formats.csr")  # weights may be sparse
    assert public.__module__.startswith(modules)
    for part in ("cpu", "cuda"):
        assert op_registry.load(family, part).__doc__


@pytest.mark.parametrize("family", op_registry.FAMILIES)
def test_cases_of_a_family_have_unique_names_and_reasons(family: str) -> None:
    cases = op_registry.load(family, "cases").CASES
    ids = [case.id for case in cases]
    assert len(ids) == len(set(ids))
    for case in cases:
        assert case.op in op_registry.FAMILIES[family]
        assert len(case.reason) >= len("a copy")
        assert case.n_bytes > 0 or not case.timed


def _modules() -> list[str]:
    found = pkgutil.walk_packages(nk.__path__, "nbflow_kernels.")
    return ["nbflow_kernels", *(module.name for module in found)]


@pytest.mark.parametrize("name", _modules())
def test_doctests(name: str) -> None:
    if name == "nbflow_kernels.torch":
        pytest.importorskip("torch", reason="needs PyTorch (extra torch)")
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_import_is_lazy_and_complete() -> None:
    program = (
        "import sys, nbflow_kernels as nk\n"
        "assert not {'numpy', 'numba'} & set(sys.modules), 'import nbflow_kernels is not lazy'\n"
        "assert set(nk.__all__) <= set(dir(nk))\n"
        "from nbflow_kernels.matmul import cpu\n"
        "import nbflow_kernels.embedding\n"
        "assert callable(nk.matmul) and callable(nk.embedding)\n"
        "from nbflow_kernels import matmul, rmsnorm\n"
        "assert matmul is nk.matmul and matmul.__module__ == 'nbflow_kernels.matmul'\n"
        "try:\n    nk.rmsnrom\n"
        "except AttributeError as error:\n    assert 'rmsnrom' in str(error)\n"
        "else:\n    raise SystemExit('no AttributeError')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=_environment())


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(nk.__path__[0]).parent)}


def test_names_of_gpu_libraries_have_an_alternative() -> None:
    """FlashInfer's names that call one raise an error with the name to use."""
    missing = "xqa"
    with pytest.raises(AttributeError, match="no attribute 'xqa'; use BatchDecodeWithPaged"):
        getattr(nk, missing)
    for names in op_registry.FLASHINFER_INSTEAD.values():
        for name in names.split("(")[0].split(" and "):
            assert name in nk.__all__


def test_names_for_type_checkers_are_the_public_names() -> None:
    tree = ast.parse(Path(nk.__path__[0], "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    written = set()
    for node in imports:
        for alias in node.names:
            every = importlib.import_module(str(node.module)).__all__ if alias.name == "*" else []
            written |= set(every or [alias.asname])
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    written |= {name.id for node in assigned for name in node.targets if isinstance(name, ast.Name)}
    types = {"AttentionPlan", "Breakers", "CascadeTiming"}  # in signatures; imported from the op
    assert written - types == set(op_registry.module_of())


@pytest.mark.parametrize("name", sorted(op_registry.module_of()))
def test_every_public_name_exists(name: str) -> None:
    assert getattr(nk, name) is not None


def test_table_of_tolerances_lists_every_case() -> None:
    text = tolerances.tolerance_table(op_registry.all_cases())
    for case in op_registry.all_cases():
        assert f"| `{case.op}` | {case.name} |" in text


def _broken(**changes: object) -> OpCase:
    case = next(case for case in CASES if case.id == "rmsnorm-ragged")
    return replace(case, **changes)  # type: ignore[arg-type]


def test_check_notices_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = op_registry.load("norm", "reference")
    right = reference.rmsnorm
    monkeypatch.setattr(
        reference, "rmsnorm", lambda x, weight, eps: right(x, weight, eps=eps) + 1e-4
    )
    with pytest.raises(
        checks.CheckError, match=r"rmsnorm-ragged: result\[\d+, \d+\] is .* the ref"
    ):
        checks.check(_broken())


def test_check_notices_nan_a_changed_argument_and_another_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = nk.rmsnorm

    def leaves_nan(x, weight, *, eps, out):  # type: ignore[no-untyped-def]
        return out

    def changes_weight(x, weight, *, eps, out):  # type: ignore[no-untyped-def]
        right(x, weight, eps=eps, out=out)
        weight += 1
        return out

    def ignores_out(x, weight, *, eps, out):  # type: ignore[no-untyped-def]
        return right(x, weight, eps=eps)

    for function, message in (
        (leaves_nan, "is nan"),
        (changes_weight, "weight was changed"),
        (ignores_out, "returned another array than out="),
    ):
        monkeypatch.setattr("nbflow_kernels.norm.rmsnorm", function)
        with pytest.raises(checks.CheckError, match=message):
            checks.check(_broken())
