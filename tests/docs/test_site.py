"""The documentation: its links, its pages made from the code, its examples."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from nbflow.cli import COMMANDS, make_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def site():
    sys.path.insert(0, str(ROOT / "tools" / "docs"))
    try:
        yield importlib.import_module("mkdocs_hooks")
    finally:
        sys.path.remove(str(ROOT / "tools" / "docs"))


@pytest.fixture(scope="module")
def made(site):
    return site.made_pages()


def anchors(markdown: str) -> set[str]:
    """Return the ids that headings get."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", markdown, flags=re.S | re.M), re.M)
    slugs = (re.sub(r"[^\w\s-]", "", head).strip().lower() for head in heads)
    return {re.sub(r"[-\s]+", "-", slug) for slug in slugs}


def test_links_lead_somewhere(site, made):
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES} | made
    for name, text in texts.items():
        assert site.broken_links(text) == [], name
        for _, _, target in site.LINK.findall(site.CODE.sub("", text)):
            path, _, anchor = target.partition("#")
            if (
                "://" in target
                or path.startswith("../")
                or path.endswith(".svg")
                or "results/" in path
            ):
                continue
            assert not path or path in texts, f"{name}: {target}"
            if anchor:
                assert anchor in anchors(texts[path or name]), f"{name}: {target}"


def test_pages_of_the_repository_link_to_files_of_the_repository(site):
    for page in [ROOT / "README.md", *PAGES]:
        text = site.CODE.sub("", page.read_text(encoding="utf-8"))
        for _, _, target in site.LINK.findall(text):
            path = target.partition("#")[0]
            assert "://" in target or (page.parent / path).exists(), f"{page.name}: {target}"


def test_broken_links_are_found(site):
    text = "[a](../nowhere.md) ![b](../README.md) `[c](../nowhere.md)` [d](../README.md) [e](#x)"
    assert site.broken_links(text) == ["../nowhere.md", "../README.md"]


def test_links_out_of_the_pages_are_html(site):
    text = "see [`a`](../tests/x.py), [b](ops.md) and `[c](../tests/x.py)`"
    assert site.with_site_links(text, "..") == (
        'see <a href="../tests/x.py">`a`</a>, [b](ops.md) and `[c](../tests/x.py)`'
    )


def test_links_between_pages_and_notebooks(site):
    text = "[a](../notebooks/rotation.ipynb) and ![b](https://x.org/b.png)"
    expected = "[a](notebooks/rotation.md) and ![b](https://x.org/b.png)"
    assert site.with_site_links(text, "..") == expected
    text = "[a](../docs/ops.md#norms) [b](pareto.ipynb) [c](x.py) ![d](rotation_files/d.png)"
    assert site.with_site_links(text, "..", "notebooks/rotation.md") == (
        '[a](../ops.md#norms) [b](pareto.md) <a href="../../notebooks/x.py">c</a> '
        "![d](rotation_files/d.png)"
    )


def test_links_of_the_notebooks_lead_somewhere(site):
    for name, path in site.notebooks().items():
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        assert site.broken_links(text, name) == []
        for _, _, target in site.LINK.findall(site.CODE.sub("", text)):
            if not site.is_elsewhere(target):
                assert (ROOT / site.repository_path(target, name)).exists(), f"{name}: {target}"


def test_every_page_is_in_the_navigation(site, made):
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    pages = [page.name for page in PAGES]
    assert sorted(listed) == sorted([*pages, *made, *site.notebooks()])


@pytest.mark.parametrize("name", COMMANDS)
def test_command_line_has_every_option(name, made):
    section = made["command_line.md"].partition(f"## nbflow {name}\n")[2].partition("\n## ")[0]
    rows = " ".join(re.findall(r"^\| `.*?` \|", section, re.M))
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", make_parser(name).format_usage()))
    assert options <= set(re.findall(r"--[a-z][\w-]*", rows))


def test_api_has_every_name(made):
    for package in ("nbflow", "nbflow_kernels", "nbflow_ptx"):
        module, page = importlib.import_module(package), made[f"api_{package}.md"]
        for name in module.__all__:
            if not name.startswith("__") and not isinstance(getattr(module, name), type(sys)):
                assert re.search(rf"^##+ {name}$", page, re.M), name


def test_api_has_the_experiments(made):
    page = made["api_nbflow_experiments.md"]
    for name in ("tensor_errors", "layer_errors", "attribution", "kv_errors", "Measure"):
        assert re.search(rf"^##+ {name}$", page, re.M), name


def test_api_has_parameters_and_fields(made):
    page = made["api_nbflow.md"]
    load = page.partition("## load\n")[2].partition("\n## ")[0]
    assert "    partition='0',\n" in load
    assert "- **`partition`** : str, default '0'\n" in load
    assert "- **`UsageError`**\n" in load
    generation = page.partition("## RequestOutput\n")[2].partition("\n## ")[0]
    assert "- **`text`** : `str`\n" in generation
