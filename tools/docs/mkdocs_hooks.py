"""The documentation as a site: mkdocs hooks (mkdocs.yml) that add pages and check links.

    python3 make.py docs    # builds site/

Pages are docs/*.md, and pages generated from the command line and the docstrings.  Links to files
outside docs/ lead into the checkout that site/ lies in, or to `extra.source_url` of mkdocs.yml
where it is set.  A broken link fails the build.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path, PurePosixPath
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


def results_images() -> list[str]:
    """Return the images in results/: the only ones that pages may show."""
    return sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("results/**/*.png"))


def broken_links(markdown: str) -> list[str]:
    """Return links out of docs/ that lead nowhere, and images from outside docs/ and results/."""
    found = []
    for image, _, target in LINK.findall(CODE.sub("", markdown)):
        path = target.partition("#")[0]
        if "://" in target or not path:
            continue
        if image:
            inside = "/" not in target and (ROOT / "docs" / target).exists()
            fine = inside or target.removeprefix("../") in results_images()
        else:
            fine = not path.startswith("../") or (ROOT / "docs" / path).resolve().exists()
        if not fine:
            found.append(target)
    return found


def with_outside_links(markdown: str, source_url: str) -> str:
    """Return a page whose links out of docs/ are HTML, which mkdocs leaves as they are."""
    blocks: list[str] = []

    def keep(match: re.Match[str]) -> str:
        blocks.append(match[0])
        return f"\0{len(blocks) - 1}\0"

    def outside(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        if image:
            return f"![{text}]({target.removeprefix('../')})"
        if not target.startswith("../"):
            return match[0]
        path = PurePosixPath(target.removeprefix("../"))
        return f'<a href="{source_url.rstrip("/")}/{path}">{text}</a>'

    # blocks first: a link's text may hold inline code, which comes back after the link is made
    text = LINK.sub(outside, CODE.sub(keep, markdown))
    return re.sub("\0(\\d+)\0", lambda m: blocks[int(m[1])], text)


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and the images."""
    from mkdocs.structure.files import File

    for name, text in made_pages().items():
        files.append(File.generated(config, name, content=text))
    for name in results_images():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Check and write the links out of docs/."""
    for target in broken_links(markdown):
        log.warning("%s: the link %r leads nowhere", page.file.src_uri, target)
    return with_outside_links(markdown, config.extra.get("source_url") or "..")
