"""Where head sets are looked for, and how one is found by its name.

The first of these folders that is given or exists is searched: the `head_sets` argument, the
environment variable JUICE_HEAD_SETS, `./head_sets`, the sets shipped with the package.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from pathlib import Path

from juice.errors import HeadSetError, HeadSetNotFoundError
from juice.head_set.head_set import HeadSet
from juice.head_set.reading import JSON_FILE, SCORES_FILE
from juice.head_set.scores import HeadScores

PACKAGED = Path(__file__).parents[1] / "_head_sets"
CHECKOUT = Path(__file__).parents[2] / "head_sets"


def shipped_folder() -> Path:
    """Return the folder of the sets shipped with JuICE: in the wheel's package or the checkout."""
    return PACKAGED if PACKAGED.is_dir() else CHECKOUT


def find_folder(given: str | Path | None) -> Path:
    """Return the folder to search.

    Raises HeadSetNotFoundError for a named folder that does not exist or is not one of head sets.
    """
    named = given or os.environ.get("JUICE_HEAD_SETS")
    if named:
        folder = Path(named)
        if not folder.is_dir():
            raise HeadSetNotFoundError(
                f"the head sets folder {named} does not exist; "
                f"make it with `juice identify --out {named}`"
            )
        if any(os.path.lexists(own / JSON_FILE) for own in (folder, *_models_in(folder))):
            raise HeadSetNotFoundError(
                f"{named} is the folder of a head set or of one model; "
                f"give the folder above, which holds <model>/<name>/{JSON_FILE}"
            )
        return folder
    local = Path("head_sets")
    return local if local.is_dir() else shipped_folder()


def sets_in(folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the folders of the head sets in a folder, by `<model>/<name>`.

    In addition, what cannot be looked into, with the reason.
    """
    found, unreadable = dict[str, Path](), dict[str, str]()
    for of_model in _models_in(folder):
        try:
            own = _folders_in(of_model)
        except OSError as error:
            key = printable(f"{of_model.name}/*")
            unreadable[key] = f"cannot look into {key.removesuffix('/*')}: {error.strerror}"
            continue
        for path in own:
            if _may_be_there(path / JSON_FILE):
                found[key_of(path)] = path
    return found, unreadable


def key_of(path: Path) -> str:
    """Return how the folder of a head set is named where others see it: `<model>/<name>`."""
    return printable(f"{path.parent.name}/{path.name}")


def stamp_of(folder: Path) -> Hashable:
    """Return what is another whenever a set of a folder is: its files' inodes, sizes and times.

    Raises HeadSetNotFoundError for a folder that cannot be looked into.
    """
    paths, unreadable = sets_in(folder)
    files = [path / name for path in paths.values() for name in (JSON_FILE, SCORES_FILE)]
    return (*unreadable.items(), *((str(file), _stamp_of(file)) for file in files))


def _stamp_of(file: Path) -> Hashable:
    try:
        own = file.stat()
    except OSError as error:
        return error.errno
    return own.st_dev, own.st_ino, own.st_size, own.st_mtime_ns, own.st_ctime_ns


def _models_in(folder: Path) -> list[Path]:
    """Return the folders of models in a folder of head sets.

    Raises HeadSetNotFoundError for one that cannot be looked into.
    """
    try:
        return _folders_in(folder)
    except OSError as error:
        raise HeadSetNotFoundError(
            f"cannot look into the head sets folder {folder}: {error.strerror}"
        ) from error


def _folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder that are not hidden, in order."""
    with os.scandir(folder) as entries:
        return sorted(
            Path(own.path) for own in entries if not own.name.startswith(".") and _is_folder(own)
        )


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link that leads nowhere, or in a circle


def _may_be_there(path: Path) -> bool:
    """Return whether there is a file, or something keeps us from seeing whether there is one."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def printable(text: str) -> str:
    """Return text as valid Unicode: a file's name may have any bytes, JSON lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def find_head_set(given: str | Path, head_sets: str | Path | None = None) -> tuple[Path, HeadSet]:
    """Return a head set and its folder, given in one of three ways.

    Args:
        given: The folder of a head set, its scores file, or its name (or `<model>/<name>`) in the
            folder of head sets.
        head_sets: The folder of head sets; None: the one that is searched for a model.

    Raises:
        HeadSetNotFoundError: There is none, or several models have one of that name.
        HeadSetError: The set is damaged.
    """
    path = Path(given)
    if path.name == SCORES_FILE:
        path = path.parent
    if os.path.lexists(path / JSON_FILE):
        return path, HeadSet.load(path)
    folder, name = find_folder(head_sets), str(given)
    found, _ = sets_in(folder)
    named = [key for key in found if name in (found[key].name, key)]
    if len(named) == 1:
        return found[named[0]], HeadSet.load(found[named[0]])
    if named:
        raise HeadSetNotFoundError(
            f"several models have a head set {name!r} in {folder}: give {' or '.join(named)}"
        )
    if path.is_dir():
        raise HeadSetNotFoundError(
            f"the folder {path} has no {JSON_FILE}; "
            "give the folder of one head set, such as head_sets/mini/context"
        )
    raise HeadSetNotFoundError(
        f"there is no head set {name!r}: give the folder of one, such as head_sets/mini/context, "
        f"its {SCORES_FILE}, or a name in {folder} ({', '.join(found) or 'none'})"
    )


def find_scores(given: str | Path, head_sets: str | Path | None = None) -> HeadScores:
    """Return the scores of a head set, given as for `find_head_set`, or of a lone scores file.

    Raises HeadSetError.
    """
    path = Path(given)
    if path.is_file() and not (path.parent / JSON_FILE).exists():
        return HeadScores.load(path)
    folder, found = find_head_set(given, head_sets)
    if found.scores is None:
        raise HeadSetError(f"{folder} has no scores; only sets made by `juice identify` have")
    return found.scores
