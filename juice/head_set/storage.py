"""A head set's folder: `head_set.json` and, where there are scores, the file that it names.

The scores `scores-<12 hex digits>.safetensors` are named by their hash, and written first.
`head_set.json` takes its name in one step, last, and commits the set; then the scores that the
replaced JSON named are removed. So a reader sees the old set or the new one, and an interrupted
save leaves the old one, perhaps beside files that no set names. A reader that finds the scores gone
reads the JSON again.

The JSON ends with the hash of all of it (`sha256`), the scores' hash included. Reading checks both
hashes. Older formats name their scores `scores.safetensors`.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from juice.errors import HeadSetError, OutputError
from juice.files import new_file, sha256_of, without_twins
from juice.head_set.schema import FIRST_FORMAT, FORMAT, SECOND_FORMAT, SHA256_PATTERN, sealed

JSON_FILE, OLD_SCORES_FILE = "head_set.json", "scores.safetensors"
SCORES_PATTERN = r"scores(-[0-9a-f]{12})?\.safetensors"
MAX_JSON_BYTES, MAX_SCORES_BYTES = 4_000_000, 64_000_000
# Savers that replace the set meanwhile need a moment.
N_TRIES, PAUSE_S = 20, 0.005


def read(folder: Path) -> tuple[dict[str, Any], bytes | None]:
    """Return the content of a folder's `head_set.json`, without its hash, and the scores' bytes.

    Raises HeadSetError, also where one of them has another hash than the JSON gives.
    """
    for _ in range(N_TRIES):
        content = content_of(_read(folder / JSON_FILE, MAX_JSON_BYTES), folder / JSON_FILE)
        name = scores_name(content)
        if name is None:
            return content, None
        try:
            data = _read(folder / name, MAX_SCORES_BYTES)
        except FileNotFoundError:
            time.sleep(PAUSE_S)
            continue
        if (actual := sha256_of(data)) != content["scores_sha256"]:
            raise HeadSetError(
                f"{folder / name} has the hash {actual}, but {JSON_FILE} gives "
                f"{content['scores_sha256']}; the file was changed or damaged"
            )
        return content, data
    raise HeadSetError(f"there is no {folder / str(name)}; copy the whole folder of the head set")


def read_scores(path: Path) -> bytes:
    """Return the bytes of a lone scores file; raises HeadSetError."""
    return _read(path, MAX_SCORES_BYTES)


def content_of(data: bytes, path: Path) -> dict[str, Any]:
    """Return the content of a head set's JSON without its hash; raises HeadSetError."""
    try:
        content = json.loads(
            data.decode(), object_pairs_hook=without_twins, parse_constant=_refused
        )
    except ValueError as error:
        raise HeadSetError(
            f"{path} is not JSON ({error}); it may be truncated: make or copy the head set again"
        ) from error
    if not isinstance(content, dict):
        raise HeadSetError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    seal = content.pop("sha256", None)
    is_sealed = content.get("format") in (FORMAT, SECOND_FORMAT)
    if is_sealed and seal != (actual := sealed(content)):
        raise HeadSetError(
            f"{path} has the hash {actual}, but gives {seal}; it was changed or damaged: change "
            "betas with `juice tune`, or make and save the set in Python"
        )
    return content


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _read(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file; raises HeadSetError, FileNotFoundError for scores."""

    def without_waiting(name: str, flags: int) -> int:
        # Opening a named pipe would wait for somebody to write to it.
        return os.open(name, flags | os.O_NONBLOCK)

    try:
        with open(path, "rb", opener=without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise HeadSetError(f"{path} is not a regular file; copy the head set again")
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and path.name != JSON_FILE:
            raise
        reason = getattr(error, "strerror", None) or error
        raise HeadSetError(
            f"cannot read the head set {path.parent}: {path.name}: {reason}; "
            f"expected the path of a folder with {JSON_FILE}, such as head_sets/mini/context"
        ) from error
    if len(data) > most:
        raise HeadSetError(f"{path} has more than {most:,} bytes, the most in a head set")
    return data


def scores_name(content: Mapping[str, Any]) -> str | None:
    """Return the name of the scores file of a head set's content; None without scores."""
    sha256 = content.get("scores_sha256")
    if not isinstance(sha256, str) or not re.fullmatch(SHA256_PATTERN, sha256):
        return None  # without scores, or refused when the content is validated
    if content.get("format") == FORMAT:
        return f"scores-{sha256.removeprefix('sha256:')[:12]}.safetensors"
    return OLD_SCORES_FILE if content.get("format") in (SECOND_FORMAT, FIRST_FORMAT) else None


def is_scores_name(name: str) -> bool:
    """Return whether a file's name is that of a head set's scores, in any format."""
    return re.fullmatch(SCORES_PATTERN, name) is not None


def files_of(content: Mapping[str, Any], scores: bytes | None) -> dict[str, bytes]:
    """Return the files of a head set by name: its scores, if any, then its sealed JSON."""
    if scores is not None:
        content = {**content, "scores_sha256": sha256_of(scores)}
    text = json.dumps({**content, "sha256": sealed(content)}, indent=1, ensure_ascii=False) + "\n"
    name = scores_name(content)
    files = {} if name is None or scores is None else {name: scores}
    return {**files, JSON_FILE: text.encode()}


def check_writable(folder: Path, *, overwrite: bool) -> None:
    """Raise OutputError, before any work is done, if no head set can be saved to the folder."""
    names: set[str] = set()
    may_write, descriptor = True, None
    try:
        # Opened once: another process may remove it meanwhile.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with os.scandir(descriptor) as entries:
            names = {entry.name for entry in entries}
        may_write = os.access(".", os.W_OK | os.X_OK, dir_fd=descriptor)
    except FileNotFoundError:
        parent = folder.parent
        while not parent.exists():
            parent = parent.parent
        _check_takes_folders(parent)
    except NotADirectoryError:
        raise OutputError(
            f"cannot write a head set to {folder}: it is a file, or would be in one; "
            "choose another name"
        ) from None
    except PermissionError:
        raise OutputError(f"cannot read {folder}: permission denied; choose another name") from None
    finally:
        if descriptor is not None:
            os.close(descriptor)
    if JSON_FILE in names and not overwrite:
        raise _exists(folder)
    if JSON_FILE not in names and not all(map(_is_left_over, names)):
        raise OutputError(
            f"{folder} is not a head set's folder; it is never overwritten: choose another name"
        )
    if not may_write:
        raise OutputError(f"cannot write to {folder}: permission denied; choose another --out")


def _check_takes_folders(parent: Path) -> None:
    """Raise OutputError if no folder can be made here; permissions do not say it, as in /proc."""
    try:
        Path(tempfile.mkdtemp(dir=parent)).rmdir()
    except OSError as error:
        raise OutputError(
            f"cannot write to {parent}: {error.strerror}; choose another --out"
        ) from error


def _exists(folder: Path) -> OutputError:
    return OutputError(
        f"{folder} exists; choose another --out or --name, or overwrite it with --force"
    )


def _is_left_over(name: str) -> bool:
    """Return whether a file may be what a killed saver left in a folder without a set."""
    return is_scores_name(name) or name.startswith((f".{JSON_FILE}.", ".scores-"))


def save(files: Mapping[str, bytes], folder: Path, *, overwrite: bool) -> None:
    """Write a head set's files to a folder, made with its parents; the last one commits the set.

    Raises OutputError for a set that must not be overwritten, or a folder that cannot be written.
    """
    check_writable(folder, overwrite=overwrite)
    scores = {name: data for name, data in files.items() if name != JSON_FILE}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = _named_in(folder)
        try:
            _write(scores, folder)
            with new_file(folder / JSON_FILE, overwrite=overwrite) as file:
                file.write(files[JSON_FILE])
        finally:
            for name in {before, *scores} - {None}:
                _remove_unless_named(str(name), folder)
        _sync(folder)
        if _named_in(folder) in scores and not all((folder / name).exists() for name in scores):
            # Another saver, which replaced a set with the same scores, removed them.
            _write(scores, folder)
    except FileExistsError:
        raise _exists(folder) from None
    except OSError as error:
        raise OutputError(
            f"cannot write the head set {folder}: {error}; choose another --out"
        ) from error


def _named_in(folder: Path) -> str | None:
    """Return the name of the scores of the set that a folder holds now; None without any."""
    try:
        path = folder / JSON_FILE
        return scores_name(content_of(_read(path, MAX_JSON_BYTES), path))
    except (HeadSetError, RecursionError):
        return None  # none, or damaged: nothing can be said of its scores


def _remove_unless_named(name: str, folder: Path) -> None:
    """Remove scores, unless they are those of the set that a folder holds now."""
    if _named_in(folder) == name:
        return
    aside = folder / f".{name}.{uuid.uuid4().hex}"
    with suppress(FileNotFoundError):
        (folder / name).rename(aside)
        # Whoever commits them from now on finds them gone; whoever did before gets them back.
        if _named_in(folder) == name:
            aside.replace(folder / name)
        else:
            aside.unlink()


def _write(files: Mapping[str, bytes], folder: Path) -> None:
    for name, data in files.items():
        with new_file(folder / name) as file:
            file.write(data)
    _sync(folder)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
