"""A head set's folder: `head_set.json` and, where there are scores, `scores.safetensors`.

The JSON ends with the hash of all of it (`sha256`), the scores' hash included. Loading checks the
format, types, ranges, finite numbers and hashes; nothing is guessed or converted.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from juice.errors import HeadSetError
from juice.head_set.reading import JSON_FILE, SCORES_FILE, files_in
from juice.head_set.schema import FIRST_FORMAT, FORMAT, HeadSetContent, sealed
from juice.head_set.scores import HeadScores
from juice.head_set.writing import write
from juice.strict_json import without_twins

S = TypeVar("S", bound=HeadSetContent)


def load(folder: Path, kind: type[S]) -> S:
    """Load and verify a head set as an instance of `kind`; raises HeadSetError.

    Warns of a set of the first format, which has no hash over the whole of it.
    """
    return from_files(files_in(folder), folder, kind)


def from_files(files: Mapping[str, bytes], folder: Path, kind: type[S]) -> S:
    """Verify the files of a head set as an instance of `kind`; raises HeadSetError.

    Args:
        files: Their contents by name.
        folder: Where they are, for messages.
        kind: What to return.
    """
    path = folder / JSON_FILE
    try:
        head_set = _parsed(files[JSON_FILE], path, kind)
        if head_set.scores_sha256 is None:
            return head_set
        scores = _scores(files, folder / SCORES_FILE, head_set)
    except RecursionError as error:
        raise HeadSetError(f"{path} is nested too deeply for a head set") from error
    return head_set.model_copy(update={"scores": scores})


def _parsed(data: bytes, path: Path, kind: type[S]) -> S:
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
    if content.get("format") == FORMAT and seal != (actual := sealed(content)):
        raise HeadSetError(
            f"{path} has the hash {actual}, but gives {seal}; it was changed or damaged: change "
            "betas with `juice tune`, or make and save the set in Python"
        )
    head_set = kind.parse(content, str(path))
    if content.get("format") == FIRST_FORMAT:
        warnings.warn(
            f"{path} is of the first format, in which a changed head or beta cannot be seen; load "
            "and save it once to seal it",
            stacklevel=5,
        )
    return head_set


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _scores(files: Mapping[str, bytes], path: Path, head_set: HeadSetContent) -> HeadScores:
    if SCORES_FILE not in files:
        raise HeadSetError(f"there is no {path}; copy the whole folder of the head set")
    actual = "sha256:" + hashlib.sha256(files[SCORES_FILE]).hexdigest()
    if actual != head_set.scores_sha256:
        raise HeadSetError(
            f"{path} has the hash {actual}, but head_set.json gives {head_set.scores_sha256}; "
            "the file was changed or damaged"
        )
    scores = HeadScores.parse(files[SCORES_FILE], path)
    expected = (head_set.model.n_layers, head_set.model.n_heads)
    if scores.plus.shape[1:] != expected:
        raise HeadSetError(
            f"{path} holds scores of shape {list(scores.plus.shape)}; "
            f"the model has (n_layers, n_heads) = {expected}"
        )
    if scores.target != head_set.target:
        raise HeadSetError(
            f"{path} holds scores toward {scores.target}; the head set's target is "
            f"{head_set.target}"
        )
    return scores


def save(
    head_set: HeadSetContent,
    folder: Path,
    *,
    overwrite: bool,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write a head set in one step, unless the last `check` of what is there raises an error.

    Raises OutputError if the folder exists (unless `overwrite`) or cannot be written.
    """
    write(files_of(head_set), folder, overwrite=overwrite, check=check)


def files_of(head_set: HeadSetContent) -> dict[str, bytes]:
    """Return the files of a head set by name, with the current hash of its scores."""
    if head_set.scores is None:
        return {JSON_FILE: to_json(head_set).encode()}
    data = head_set.scores.to_bytes()
    head_set = head_set.model_copy(
        update={"scores_sha256": "sha256:" + hashlib.sha256(data).hexdigest()}
    )
    return {SCORES_FILE: data, JSON_FILE: to_json(head_set).encode()}


def to_json(head_set: HeadSetContent) -> str:
    """Return the text of a head set's JSON file, sealed by its hash."""
    content = head_set.model_dump(mode="json")
    return json.dumps(content | {"sha256": head_set.seal}, indent=1, ensure_ascii=False) + "\n"
