"""API keys, from the settings and from a file, which may say what each may do.

A file that ends in `.toml` has a table for each key:

    [[keys]]
    name = "search"
    sha256 = "..."                 # of the key: printf %s "$KEY" | sha256sum
    scopes = ["generate", "read"]  # or metrics; these three where none are named; or admin
    priority = 0                   # the most urgent one that it may use
    requests_per_minute = 600
    tokens_per_minute = 100_000
    max_running = 8
    max_waiting = 64

Any other file has a key on each line, and lines of comments that begin with `#`. Only keys that
name the scope `admin` may change what is served.
"""

from __future__ import annotations

import hmac
import tomllib
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from juice.errors import UsageError
from juice.options import first_problem
from juice_server.clients import PERMISSIONS, Client, Permission

MAX_PRIORITY = 100
AtLeastOne = Annotated[int | None, Field(ge=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=r"^[\w.:@/+-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: list[Permission] = Field(default=list(PERMISSIONS), min_length=1)
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    requests_per_minute: AtLeastOne = None
    tokens_per_minute: AtLeastOne = None
    max_running: AtLeastOne = None
    max_waiting: AtLeastOne = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    keys: list[_Table] = Field(min_length=1)


class Keys:
    """The keys that are known; only digests are kept.

    Args:
        given: Keys that may do everything but change what is served.
        path: The file; None: there is none.

    Raises UsageError for a file that cannot be read, holds no key or has one twice.
    """

    def __init__(self, given: Sequence[str] = (), path: Path | None = None) -> None:
        self._given, self._path = given, path
        self._clients: dict[bytes, Client] = {}
        self.reload()

    def __len__(self) -> int:
        return len(self._clients)

    def reload(self) -> None:
        """Read the file again; what was known stays where it cannot be read.

        Raises UsageError.
        """
        clients = dict(_plain(key) for key in self._given)
        if self._path is not None:
            clients |= _read(self._path)
        self._clients = clients

    def may_any(self, needed: Permission) -> bool:
        """Return whether one of them has a scope."""
        return any(needed in client.scopes for client in self._clients.values())

    def find(self, key: bytes) -> Client | None:
        """Return whose key it is, None if it is unknown; all are compared, in constant time."""
        sent = sha256(key).digest()
        found = [own for digest, own in self._clients.items() if hmac.compare_digest(sent, digest)]
        return found[0] if key and found else None


def _plain(key: str) -> tuple[bytes, Client]:
    digest = sha256(key.encode())
    return digest.digest(), Client(name=f"key-{digest.hexdigest()[:8]}", has_key=True)


def _read(path: Path) -> dict[bytes, Client]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the keys in {path}: {error}") from error
    if path.suffix == ".toml":
        return _from_toml(text, path)
    lines = [line.strip() for line in text.splitlines()]
    own = [line for line in lines if line and not line.startswith("#")]
    if not own:
        raise UsageError(f"{path} holds no key; expected one per line")
    return dict(_plain(line) for line in own)


def _from_toml(text: str, path: Path) -> dict[bytes, Client]:
    try:
        tables = _File.model_validate(tomllib.loads(text)).keys
    except ValidationError as error:
        field, problem = first_problem(error)
        remedy = "expected [[keys]] with name and sha256"
        raise UsageError(f"{path}: {field}: {problem}; {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    for field in ("name", "sha256"):
        value, n = Counter(getattr(own, field) for own in tables).most_common(1)[0]
        if n > 1:
            raise UsageError(f"{path}: {n} keys have the {field} {value}; give each its own")
    return {
        bytes.fromhex(own.sha256): Client(
            **own.model_dump(exclude={"sha256", "scopes"}),
            scopes=tuple(own.scopes),
            has_key=True,
        )
        for own in tables
    }
