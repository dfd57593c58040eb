"""The documentation as a site: mkdocs hooks (mkdocs.yml) that add pages and check links.

    python3 make.py docs    # builds site/

Pages are docs/*.md, the notebooks with their stored outputs, and pages generated from the command
line and the docstrings.  Links to files that are on no page lead into the checkout that site/ lies
in, or to `extra.source_url` of mkdocs.yml where it is set.  A broken link fails the build.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "docs"))  # mkdocs imports this file alone

from api_pages import ABOUT, api_page  # noqa: E402
from command_line_page import command_line_page  # noqa: E402

log = logging.getLogger("mkdocs.nbflow_hooks")

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|^(?: {4}[^\n]*\n)+|`[^`\n]+`", re.S | re.M)


def made_pages() -> dict[str, str]:
    """Return the generated pages, by name."""
    pages = {"command_line.md": command_line_page()}
    for package in ABOUT:
        pages[f"api_{package}.md"] = api_page(package)
    return pages


def notebooks() -> dict[str, Path]:
    """Return the notebooks, by the name of the page that each becomes."""
    return {f"notebooks/{p.stem}.md": p for p in sorted((ROOT / "notebooks").glob("*.ipynb"))}


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook with its stored outputs as Markdown, and its images by file name."""
    from nbconvert import MarkdownExporter

    resources = {"output_files_dir": f"{path.stem}_files"}
    text, made = MarkdownExporter().from_filename(str(path), resources)
    return text, made["outputs"]


def results_images() -> list[str]:
    """Return the images in results/, which pages may show."""
    return sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("results/**/*.png"))


def repository_path(target: str, page: str) -> str:
    """Return the file in the repository that a link on a page of the site leads to."""
    folder = "notebooks" if page.startswith("notebooks/") else "docs"
    return posixpath.normpath(posixpath.join(folder, target.partition("#")[0]))


def site_path(path: str) -> str | None:
    """Return where the site has a file of the repository, None where it does not."""
    if path.startswith("notebooks/"):
        page = path.removesuffix(".ipynb") + ".md"
        return page if page in notebooks() else path if "_files/" in path else None
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path in results_images() else None


def is_elsewhere(target: str) -> bool:
    """Return whether a link leads to another site or to a heading of its own page."""
    return "://" in target or target.startswith("#")


def broken_links(markdown: str, page: str = "index.md") -> list[str]:
    """Return links out of docs/ that lead nowhere, and images that the site does not have.

    mkdocs checks links among pages.
    """
    found = []
    for image, _, target in LINK.findall(CODE.sub("", markdown)):
        if is_elsewhere(target):
            continue
        path = repository_path(target, page)
        inside = site_path(path) is not None
        exists = (ROOT / path).exists() or "_files/" in path
        if (image and not (inside and exists)) or not (inside or exists):
            found.append(target)
    return found


def with_site_links(markdown: str, source_url: str, page: str = "index.md") -> str:
    """Return a page with the links of the repository replaced by those of the site.

    Links to files that the site does not have become HTML, which mkdocs leaves as they are.
    """
    blocks: list[str] = []
    if "://" not in source_url:
        source_url = "../" * page.count("/") + source_url

    def keep(match: re.Match[str]) -> str:
        blocks.append(match[0])
        return f"\0{len(blocks) - 1}\0"

    def replaced(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        if is_elsewhere(target):
            return match[0]
        path = repository_path(target, page)
        inside = site_path(path)
        if inside is None:
            return f'<a href="{source_url.rstrip("/")}/{path}">{text}</a>'
        relative = posixpath.relpath(inside, posixpath.dirname(page) or ".")
        return f"{image}[{text}]({relative}{''.join(target.partition('#')[1:])})"

    # blocks first: a link's text may hold inline code, which comes back after the link is made
    text = LINK.sub(replaced, CODE.sub(keep, markdown))
    return re.sub("\0(\\d+)\0", lambda m: blocks[int(m[1])], text)


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and the images."""
    from mkdocs.structure.files import File

    for name, text in made_pages().items():
        files.append(File.generated(config, name, content=text))
    for name, path in notebooks().items():
        text, images = notebook_page(path)
        files.append(File.generated(config, name, content=text))
        for image, content in images.items():
            files.append(File.generated(config, f"notebooks/{image}", content=content))
    for name in results_images():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Check and write the links out of docs/."""
    name = page.file.src_uri
    for target in broken_links(markdown, name):
        log.warning("%s: the link %r leads nowhere", name, target)
    return with_site_links(markdown, config.extra.get("source_url") or "..", name)
