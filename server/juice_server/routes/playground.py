"""GET /: the playground, a page of plain files that asks nobody but this server.

The page itself needs no key: it has nothing to hide, and asks for the key that its requests need.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException

from juice.files import LOOK

FOLDER = Path(__file__).parents[1] / "playground"
FILES = {path.name: path for path in (*sorted(FOLDER.iterdir()), LOOK) if path.is_file()}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # the files of another version have the same names
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> FileResponse:
    """Return the page."""
    return _file("index.html")


@router.get("/playground/{name}")
async def file(name: str) -> FileResponse:
    """Return one of its files."""
    return _file(name)


def _file(name: str) -> FileResponse:
    if name not in FILES:
        raise HTTPException(404)
    path = FILES[name]
    return FileResponse(path, headers=HEADERS, media_type=TYPES[path.suffix])
