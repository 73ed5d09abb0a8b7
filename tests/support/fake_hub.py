"""A fake Hugging Face hub on loopback, for huggingface_hub's own client.

It has the endpoints that create, fill, list and read a model repository. Safetensors files go
through the large file storage (batch, upload, redirect), as on the hub; all others are in the
commits. Tokens: `writer` may do everything, `reader` may read what is open; without one, private
and missing repositories look alike.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

TOKENS = ("writer", "reader")


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], message: str = "", branch: str = "main") -> str:
        sha = hashlib.sha1(
            f"{len(self.commits)} {message}".encode(), usedforsecurity=False
        ).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        self.messages.append(message)
        return sha

    def sha_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.branches["main"]]


class Hub(ThreadingHTTPServer):
    """The server and what it holds."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        # Another host, as on the hub: the client takes what it needs from a redirect's headers and
        # does not follow it to its own host.
        self.large_url = f"http://localhost:{self.server_port}/large"
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.asked: list[str] = []


@contextmanager
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class RefusedError(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        self.status, self.message, self.code = status, message, code


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET  # named by http.server  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            for pattern, answer in ROUTES:
                if found := re.fullmatch(pattern, f"{self.command} {path}"):
                    return answer(self, **found.groupdict())
            raise RefusedError(404, f"the fake hub has no {self.command} {path}")
        except RefusedError as refused:
            headers = {
                "X-Error-Message": refused.message,
                **({"X-Error-Code": refused.code} if refused.code else {}),
            }
            self._send(
                json.dumps({"error": refused.message}).encode(), status=refused.status, **headers
            )

    def _send(self, data: bytes, *, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self, document: Any, *, status: int = 200) -> None:
        self._send(
            json.dumps(document).encode(), status=status, **{"Content-Type": "application/json"}
        )

    def _token(self) -> str:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in TOKENS:
            raise RefusedError(401, "Invalid credentials in Authorization header")
        return token

    def _may_write(self) -> None:
        if not self._token():
            raise RefusedError(401, "Invalid username or password.")
        if self._token() != "writer":
            raise RefusedError(403, "You don't have the rights to write here")

    def _repo(self, name: str) -> Repo:
        repo = self.server.repos.get(name)
        if repo is None or (repo.private and self._token() != "writer"):
            raise RefusedError(
                404 if self._token() else 401, "Repository not found", "RepoNotFound"
            )
        return repo

    def _commit_of(self, repo: Repo, revision: str) -> str:
        sha = repo.sha_of(revision)
        if sha is None:
            raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    def create(self) -> None:
        self._may_write()
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        exists = name in self.server.repos
        if not exists:
            self.server.repos[name] = Repo(private=asked.get("visibility") == "private")
            self.server.repos[name].commit({}, "initial commit")
        self._json(
            {"url": f"{self.server.url}/{name}", "name": name}, status=409 if exists else 200
        )

    def check_card(self) -> None:
        assert json.loads(self.body)["content"].startswith("---\n")
        self._json({"warnings": [], "errors": []})

    def preupload(self, repo: str, **_: str) -> None:
        self._repo(repo)
        self._may_write()
        names = [file["path"] for file in json.loads(self.body)["files"]]
        modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
        self._json(
            {
                "files": [
                    {"path": name, "uploadMode": modes[name], "shouldIgnore": False}
                    for name in names
                ]
            }
        )

    def lfs_batch(self, **_: str) -> None:
        self._may_write()
        upload = [
            {
                "oid": o["oid"],
                "size": o["size"],
                "actions": {"upload": {"href": f"{self.server.large_url}/{o['oid']}"}},
            }
            for o in json.loads(self.body)["objects"]
        ]
        self._json({"transfer": "basic", "objects": upload})

    def store_large(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.server.large[oid] = self.body
        self._send(b"")

    def read_large(self, oid: str) -> None:
        self._send(self.server.large[oid])

    def commit(self, repo: str, revision: str) -> None:
        stored = self._repo(repo)
        self._may_write()
        lines = [json.loads(line) for line in self.body.splitlines()]
        files = dict(stored.commits[self._commit_of(stored, revision)])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        sha = stored.commit(files, lines[0]["value"]["summary"], revision)
        self._json({"commitUrl": f"{self.server.url}/{repo}/commit/{sha}", "commitOid": sha})

    def info(self, repo: str, revision: str = "main") -> None:
        stored = self._repo(repo)
        self._json(
            {
                "id": repo,
                "sha": self._commit_of(stored, revision),
                "private": stored.private,
                "gated": "manual" if stored.gated else False,
            }
        )

    def tree(self, repo: str, revision: str) -> None:
        stored = self._repo(repo)
        files = stored.commits[self._commit_of(stored, revision)]
        self._json(
            [
                {"type": "file", "path": name, "size": len(data), "oid": oid_of(data)}
                for name, data in files.items()
            ]
        )

    def resolve(self, repo: str, revision: str, name: str) -> None:
        stored = self._repo(repo)
        sha = self._commit_of(stored, revision)
        if stored.gated and self._token() != "writer":
            raise RefusedError(
                403 if self._token() else 401, "Access to this model is restricted", "GatedRepo"
            )
        data = stored.commits[sha].get(name)
        if data is None:
            raise RefusedError(404, "Entry not found", "EntryNotFound")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{oid_of(data)}"'}
        if not name.endswith(".safetensors"):
            return self._send(data, **headers)
        oid = hashlib.sha256(data).hexdigest()
        self.server.large[oid] = data
        linked = {
            "X-Linked-ETag": f'"{oid}"',
            "X-Linked-Size": str(len(data)),
            "Location": f"{self.server.large_url}/{oid}",
        }
        return self._send(b"", status=302, **headers, **linked)


def oid_of(data: bytes) -> str:
    """Return git's hash of a blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


REPO, REVISION = r"(?P<repo>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
ROUTES = [
    (r"POST /api/repos/create", Handler.create),
    (r"POST /api/validate-yaml", Handler.check_card),
    (rf"POST /api/models/{REPO}/preupload/{REVISION}", Handler.preupload),
    (rf"POST /api/models/{REPO}/commit/{REVISION}", Handler.commit),
    (rf"GET /api/models/{REPO}/tree/{REVISION}", Handler.tree),
    (rf"GET /api/models/{REPO}/revision/{REVISION}", Handler.info),
    (rf"GET /api/models/{REPO}", Handler.info),
    (r"POST /(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (r"PUT /large/(?P<oid>[0-9a-f]{64})", Handler.store_large),
    (r"(GET|HEAD) /large/(?P<oid>[0-9a-f]{64})", Handler.read_large),
    (rf"(GET|HEAD) /{REPO}/resolve/{REVISION}/(?P<name>.+)", Handler.resolve),
]
