"""Chat page: static files of this package, without external resources."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from nbflow.server.errors import ApiError

router = APIRouter(include_in_schema=False)

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_NAMES = ("index.html", "chat.css", "chat.js", "markup.js")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/")
async def page() -> Response:
    """Return the page."""
    return _file("index.html")


@router.get("/page/{name}")
async def part(name: str) -> Response:
    """Return a static file of the page."""
    if name not in _NAMES:
        raise ApiError(404, f"the chat page has no file {name[:80]!r}")
    return _file(name)


def _file(name: str) -> Response:
    data = (files("nbflow.server") / "chat_page" / name).read_bytes()
    kind = _KINDS[name.rsplit(".", 1)[1]]
    headers = {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    return Response(data, headers=headers, media_type=kind)
