"""The files of a head set's folder as bytes: regular, bounded, and all of one saving.

The folder is opened once, and its files are opened in it: a saver that replaces the folder
meanwhile changes nothing for whoever has it open. The saver then removes the old one, so a folder
that was replaced while it was read is read again.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from juice.errors import HeadSetError

JSON_FILE, SCORES_FILE = "head_set.json", "scores.safetensors"
MAX_BYTES = {JSON_FILE: 4_000_000, SCORES_FILE: 64_000_000}
N_TRIES = 100


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the files of a head set that its folder holds, by name.

    Raises HeadSetError for a folder without `head_set.json`, and for a file that cannot be read.
    """
    for _ in range(N_TRIES):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise _unreadable(folder, error) from error
        try:
            found = _read_all(descriptor, folder)
        except OSError as error:
            if _is_still(descriptor, folder):
                raise _unreadable(folder, error) from error
        else:
            if _is_still(descriptor, folder):
                return found
        finally:
            os.close(descriptor)
    raise HeadSetError(f"{folder} is replaced again and again while it is read; try again later")


def read_file(path: Path) -> bytes:
    """Return the bytes of a lone file of a head set; raises HeadSetError."""
    try:
        return _read(path, MAX_BYTES[SCORES_FILE], path)
    except (OSError, ValueError) as error:
        raise HeadSetError(
            f"cannot read the scores {path}: {error}; expected the file {SCORES_FILE} of a head set"
        ) from error


def _read_all(descriptor: int, folder: Path) -> dict[str, bytes]:
    names = set(os.listdir(descriptor)) & MAX_BYTES.keys() | {JSON_FILE}
    return {name: _read(name, MAX_BYTES[name], folder / name, descriptor) for name in names}


def _read(name: str | Path, most: int, path: Path, folder: int | None = None) -> bytes:
    # Opening a named pipe would wait for somebody to write to it.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
        own = os.fstat(file.fileno())
        if not stat.S_ISREG(own.st_mode):
            raise HeadSetError(f"{path} is not a regular file; copy the head set again")
        data = file.read(most + 1)
    if len(data) > most:
        raise HeadSetError(f"{path} has more than {most:,} bytes, the most in a head set")
    return data


def _is_still(descriptor: int, folder: Path) -> bool:
    """Return whether a folder that was opened is the one that has its name now."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False


def _unreadable(folder: Path, error: Exception) -> HeadSetError:
    reason = getattr(error, "strerror", None) or error
    return HeadSetError(
        f"cannot read the head set {folder}: {reason}; "
        f"expected the path of a folder with {JSON_FILE}, such as head_sets/mini/context"
    )
