"""Writing a head set's folder in one step.

The files are written to a temporary folder next to their own, synced, and renamed: a reader sees
the old set or the new one, and an interrupted write leaves no set. A saver holds a lock on its
temporary folder, so the next one knows those of savers that were killed, and removes them. Folders
are renamed under a lock on their parent, so whoever looks there under it sees what will be
replaced.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from juice.errors import OutputError
from juice.head_set.reading import JSON_FILE

PREFIX = ".juice-saving-"


def write(
    files: Mapping[str, bytes],
    folder: Path,
    *,
    overwrite: bool,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write files to a folder in one step.

    Args:
        files: Their contents by name.
        folder: The folder.
        overwrite: Whether it may exist.
        check: Looks at what is there once no other saver can change it; what it raises is passed
            on, and nothing is changed.

    Raises:
        OutputError: The folder exists, and must not, or cannot be written.
    """
    try:
        folder = folder.resolve()
        check_writable(folder, overwrite=overwrite)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(folder.parent) as temporary:
            for name, data in files.items():
                _write(temporary / name, data)
            _sync(temporary)
            with _locked(folder.parent):
                check()
                _put(temporary, folder, overwrite=overwrite)
            _sync(folder.parent)
    except OSError as error:
        raise OutputError(
            f"cannot write the head set {folder}: {error}; choose another --out"
        ) from error


def remove(folder: Path, *, check: Callable[[], None]) -> None:
    """Remove a folder in one step, unless `check` of what is there raises an error.

    Raises OutputError if it cannot be removed.
    """
    gone = folder.with_name(f"{PREFIX}{uuid.uuid4().hex}")
    try:
        with _locked(folder.parent):
            check()
            folder.rename(gone)
        _sync(folder.parent)
        gone.unlink() if gone.is_symlink() else shutil.rmtree(gone, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"cannot remove the head set {folder}: {error}") from error


def check_writable(folder: Path, *, overwrite: bool) -> None:
    """Raise OutputError, before any work is done, if no head set can be saved to the folder."""
    # One look: another process may remove it meanwhile.
    try:
        names = {own.name for own in folder.iterdir()}
    except FileNotFoundError:
        names = None
    except NotADirectoryError:
        raise OutputError(
            f"cannot write a head set to {folder}: it is a file, or would be in one; "
            "choose another name"
        ) from None
    except PermissionError:
        raise OutputError(f"cannot read {folder}: permission denied; choose another name") from None
    if names is not None and not overwrite:
        raise _exists(folder)
    if names and JSON_FILE not in names:
        raise OutputError(
            f"{folder} is not a head set's folder; it is never overwritten: choose another name"
        )
    parent = folder.parent
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write to {parent}: permission denied; choose another --out")


def _exists(folder: Path) -> OutputError:
    return OutputError(
        f"{folder} exists; choose another --out or --name, or overwrite it with --force"
    )


@contextmanager
def _temporary(parent: Path) -> Iterator[Path]:
    """Make a locked folder in another, remove it at the end, and those that were left over before.

    The parent is locked until the new one is: no other saver can take it for one left over.
    """
    with _locked(parent):
        for old in parent.glob(f"{PREFIX}*"):
            if _is_left_over(old):
                shutil.rmtree(old, ignore_errors=True)
        own = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = os.open(own, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        own.chmod(0o755)
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
        os.close(lock)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_left_over(temporary: Path) -> bool:
    """Return whether the saver of a temporary folder is gone, and its lock with it."""
    try:
        descriptor = os.open(temporary, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _put(temporary: Path, folder: Path, *, overwrite: bool) -> None:
    """Give a written folder its name.

    Without `overwrite` only one of several savers succeeds: a folder that holds something cannot be
    renamed over.
    """
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        if not overwrite:
            raise _exists(folder) from None
        _exchange(temporary, folder)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders: atomically on Linux (renameat2), elsewhere by two renames."""
    if sys.platform == "linux":
        at_cwd, rename_exchange = -100, 2
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(at_cwd, os.fsencode(new), at_cwd, os.fsencode(old), rename_exchange) == 0:
            return
    # Its name is not that of a temporary folder, which the next saver would remove.
    aside = new.with_name(f".replaced-{new.name}")
    old.rename(aside)
    new.rename(old)
    aside.rename(new)
