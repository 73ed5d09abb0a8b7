"""Files that come with the package, and files written in one step, hashed and read strictly.

Readers of a file written in one step see the old one or the new one; an interrupted write leaves
nothing. In strict JSON an object has every name once: programs differ in which of two they take.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from juice.errors import OutputError

# The bundled model: weights, tokenizer, examples.
MINI = Path(__file__).parent / "models" / "mini"
# How every page looks: the playground and the reports.
LOOK = Path(__file__).with_name("look.css")


def check_writable(path: Path, *, overwrite: bool) -> None:
    """Raise OutputError, before any work is done, if the file cannot be written."""
    try:
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is not a file; choose another --out")
        if path.exists() and not overwrite:
            raise OutputError(f"{path} exists; choose another --out, or overwrite it with --force")
        parent = path.resolve().parent
        while not parent.exists():
            parent = parent.parent
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another --out") from error


def write_lines(path: Path, lines: Iterable[str], *, overwrite: bool) -> None:
    """Write lines, with their line ends, to a file in one step; raises OutputError."""
    check_writable(path, overwrite=overwrite)
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file:
            file.writelines(line.encode() for line in lines)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another --out") from error


@contextmanager
def new_file(path: Path, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Open a file that takes its name once it is written and synced, and none after an error.

    Until then it is hidden, beside its place. Raises FileExistsError where nothing may be
    overwritten and the name is taken.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    hidden = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        hidden.chmod(0o644)
        if overwrite:
            hidden.replace(path)
        else:
            path.hardlink_to(hidden)
    finally:
        hidden.unlink(missing_ok=True)


def sha256_of(data: bytes) -> str:
    """Return the hash of a file's bytes: `sha256:` and 64 hexadecimal digits."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object from its pairs, for `object_pairs_hook`; raises ValueError for twins."""
    found = dict[str, Any]()
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} is given twice; give it once")
        found[name] = value
    return found
