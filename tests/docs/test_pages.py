"""Pages for users: what they list exists, and is complete."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from mpirun import SOURCES

from nbflow import cli
from nbflow.checkpoint.quantization_config import METHODS
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS
from nbflow_kernels.formats.float8 import FLOAT8
from nbflow_kernels.kv_cache.codebooks import CODEBOOKS
from nbflow_kernels.kv_cache.formats import kv_format
from nbflow_kernels.op_registry import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def page(name: str) -> str:
    """Return the text of a page."""
    return (DOCS / name).read_text(encoding="utf-8")


def python_blocks(text: str) -> list[str]:
    """Return the Python examples of a page."""
    return re.findall(r"```python\n(.*?)```", text, re.S)


def test_the_readme_fits_two_screens_and_begins_with_a_picture():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) < 11_000
    assert "![" in "\n".join(text.splitlines()[:12])


def test_the_readme_prints_what_its_example_prints(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = next(block for block in python_blocks(text) if "tensor_errors" in block)
    exec(compile(example, "README.md", "exec"), {})
    found = capsys.readouterr().out.splitlines()
    shown = re.search(r"^```text\n( +stored_bits.*?)```", text, re.S | re.M)[1].splitlines()
    assert len(found) > len(shown)
    for line, other in zip(found, shown, strict=False):
        for word, stated in zip(line.split(), other.split(), strict=True):
            # the search may round ties differently on other processors
            assert word == stated or float(word) == pytest.approx(float(stated), rel=1e-3)


def test_environment_page_lists_the_variables_of_the_code():
    listed = set(re.findall(r"`(NBFLOW_[A-Z_]+)`", page("environment.md")))
    used: set[str] = set()
    for root in (ROOT / "nbflow", *SOURCES[1:]):
        for path in root.rglob("*.py"):
            used |= set(re.findall(r"\bNBFLOW_[A-Z_]+\b", path.read_text(encoding="utf-8")))
    assert listed == used - {"NBFLOW_VOCAB_DIR"}


def test_install_page_lists_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = re.findall(r"^\| (`.*?`) \|", page("install.md"), re.M)
    assert {name for row in table for name in re.findall(r"`([\w-]+)`", row)} == set(
        project["optional-dependencies"]
    )


def test_notebooks_page_lists_every_notebook():
    listed = re.findall(r"\]\(\.\./notebooks/(\w+\.ipynb)\)", page("notebooks.md"))
    assert sorted(listed) == sorted(p.name for p in (ROOT / "notebooks").glob("*.ipynb"))
    for name in listed:
        assert json.loads((ROOT / "notebooks" / name).read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("name", ["get_started", "choosing_a_format", "memory", "troubleshooting"])
def test_commands_exist(name):
    for command in re.findall(
        r"(?:^    (?:mpirun -n \d+ )?|`)nbflow ([a-z]+)\b", page(f"{name}.md"), re.M
    ):
        assert command in cli.COMMANDS


def test_example_of_first_steps_prints_what_the_page_says(capsys):
    (example,) = python_blocks(page("get_started.md"))
    exec(compile(example, "get_started.md", "exec"), {})
    bits, difference = map(float, capsys.readouterr().out.split())
    assert bits == 4.5
    assert difference == pytest.approx(0.0054, rel=0.05)  # the page says "about"


def test_examples_with_pytorch_run():
    torch = pytest.importorskip("torch", reason="needs PyTorch, which the tests do not install")
    space = {"tensor": torch.ones(3)}
    for block in python_blocks(page("torch.md")):
        exec(compile(block, "torch.md", "exec"), space)
    assert float(space["error"]) < 6  # 32 * 0.12 (error of q3h) / sqrt(pi / 2) = 3.1


def test_stated_numbers_of_formats():
    def holds_cache_rows(name):
        try:
            kv_format(name)
        except UsageError:
            return False
        return True

    cache = sum(map(holds_cache_rows, FORMATS)) + len(FLOAT8) + len(CODEBOOKS)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for text in (readme, page("index.md")):
        assert f"{len(FORMATS)}\nweight formats" in text
    assert f"of the {len(FORMATS)} formats" in readme
    assert f"any of {cache} formats" in page("models.md")
    assert f"[{cache} formats, in pages]" in page("comparison.md")


def test_stated_number_of_functions():
    names = sum(map(len, FAMILIES.values()))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{names} functions and classes" in readme


def test_stated_numbers_of_models():
    specs = ROOT / "specs/nbflow_specs"
    families = len(list((specs / "families").glob("*.toml")))
    golden = len(list((ROOT / "tests/golden/families").iterdir()))
    comparison = page("comparison.md")
    for pattern, found in (
        (r"more than (\d+) families", families),
        (r"more than (\d+) tiny checkpoints", golden),
    ):
        stated = int(re.search(pattern, comparison)[1])
        assert stated < found <= stated + 30, pattern
    released = len(list((specs / "models").glob("*.toml")))
    for name in ("models.md", "family_files.md"):
        assert f"Some {round(released, -1)} released models" in page(name)


def test_what_checkpoints_are_read():
    """README and the comparison name as missing only what the readers refuse."""
    stated = re.search(r"Missing: (.*?)\.\n", (ROOT / "README.md").read_text(), re.S)[1]
    lacking = page("comparison.md").partition("## Projects that measure")[0]
    row = re.search(r"^\| reading checkpoints of (.*?) \(", lacking, re.M)[1]
    for method in METHODS:
        assert f"`{method}`" in page("checkpoints.md"), method
        assert method.lower() not in f"{stated} {row}".lower(), method


def commands() -> list[tuple[str, str, str]]:
    """Return page, command and arguments of the nbflow commands that pages show."""
    found = []
    for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]:
        text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
        for name, rest in re.findall(
            r"^ {4}(?:mpirun -n \d+ )?nbflow ([a-z]+)((?: .*)?)$", text, re.M
        ):
            if "[--" not in rest:  # a synopsis
                found.append((path.name, name, rest))
    return found


@pytest.mark.parametrize(("name", "command", "arguments"), commands())
def test_shown_commands_have_these_options(name, command, arguments):
    words = shlex.split(arguments, comments=True)
    if not {"|", ">", "&&"} & set(words):
        cli.make_parser(command).parse_args(words)
