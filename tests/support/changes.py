"""Head sets that are sent to a server: the body, the keys that may, and what the library says."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx

from juice.head_set import HeadSet
from juice.head_set.storage import files_of
from tests.support.serving import Server

ADMIN = {"authorization": "Bearer the-admin's"}
USER = {"authorization": "Bearer a-user's"}


def keys_file(folder: Path) -> Path:
    """Write a file of two keys: one may do everything, the other what is usual."""
    file = folder / "keys.toml"
    scopes = {"admin": 'scopes = ["admin", "generate", "read", "metrics"]', "user": ""}
    file.write_text(
        "".join(
            f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n'
            f"{scopes[name]}\n"
            for name, key in (("admin", "the-admin's"), ("user", "a-user's"))
        )
    )
    return file


def body_of(head_set: HeadSet) -> dict[str, Any]:
    """Return the body that brings a head set."""
    files = files_of(head_set)
    scores = files.get("scores.safetensors")
    return {
        "head_set": json.loads(files["head_set.json"]),
        "scores": None if scores is None else base64.b64encode(scores).decode(),
    }


def put(server: Server, head_set: HeadSet, name: str | None = None, **headers: str) -> Any:
    """Send a head set with the admin's key."""
    return httpx.put(
        f"{server.url}/v1/head_sets/{name or head_set.name}",
        json=body_of(head_set),
        headers={**ADMIN, **{key.replace("_", "-"): value for key, value in headers.items()}},
        timeout=60,
    )


def delete(server: Server, name: str, **headers: str) -> httpx.Response:
    """Remove a head set with the admin's key."""
    own = {key.replace("_", "-"): value for key, value in headers.items()}
    url = f"{server.url}/v1/head_sets/{name}"
    return httpx.delete(url, headers={**ADMIN, **own}, timeout=60)


def etag(server: Server, name: str) -> str | None:
    """Return the ETag of a head set that a server serves; None where it serves none."""
    found = httpx.get(f"{server.url}/v1/head_sets/{name}", headers=ADMIN, timeout=60)
    return found.headers.get("etag")


def what_is_in(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder and their contents."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
