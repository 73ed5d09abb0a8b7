"""Clients: who sends a request, and what they may do.

Those with an API key are known by it, others by their address. Keys come from the settings and from
a file: one that ends in `.toml` has a table `[[keys]]` for each key, with the SHA-256 of the key;
any other has a key on each line, and lines of comments that begin with `#`.
"""

from __future__ import annotations

import hmac
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from juice.errors import UsageError, first_problem

Permission = Literal["generate", "read", "metrics"]
PERMISSIONS: tuple[Permission, ...] = get_args(Permission)


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client, the same one however many connections it has.

    Args:
        name: The name of its key, or its address.
        has_key: Whether it has a key.
        scopes: Its permissions.
        priority: The lowest number, so the most urgent priority, that it may use.
        requests_per_minute: The most HTTP requests that generate which it may send.
        tokens_per_minute: The most tokens that they may have, prompts and answers.
        max_running: The most of its generations that run at the same time.
        max_waiting: The most of its generations that wait.
        control_tokens: Whether its messages and contexts may form control tokens, if they ask so.
    """

    name: str
    has_key: bool = False
    scopes: tuple[Permission, ...] = PERMISSIONS
    priority: int = 0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_running: int | None = None
    max_waiting: int | None = None
    control_tokens: bool = True


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
    control_tokens: bool = True


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    keys: list[_Table] = Field(min_length=1)


class Keys:
    """The keys that are known: those given, which may do everything, and those of the file.

    Raises UsageError for a file that cannot be read, holds no key or has one twice.
    """

    def __init__(self, given: Sequence[str] = (), path: Path | None = None) -> None:
        self._given, self._path = given, path
        self._clients: dict[bytes, Client] = {}
        self.reload()

    def __len__(self) -> int:
        return len(self._clients)

    def reload(self) -> None:
        """Read the file again; raises UsageError, and keeps what was known, where that fails."""
        read = {} if self._path is None else _read(self._path)
        self._clients = {**dict(map(_plain, self._given)), **read}

    def find(self, key: bytes) -> Client | None:
        """Return the client of a key, None if it is unknown; all are compared in constant time."""
        sent, known = sha256(key).digest(), self._clients
        found = [known[digest] for digest in known if hmac.compare_digest(sent, digest)]
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
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"{path} holds no key; expected one per line")
    return dict(map(_plain, keys))


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
        value, n = Counter(getattr(table, field) for table in tables).most_common(1)[0]
        if n > 1:
            raise UsageError(f"{path}: {n} keys have the {field} {value}; give each its own")
    return {
        bytes.fromhex(table.sha256): Client(
            **table.model_dump(exclude={"sha256", "scopes"}),
            scopes=tuple(table.scopes),
            has_key=True,
        )
        for table in tables
    }
