"""The head sets for a loaded model.

The first of these folders that is given or exists is searched: the `head_sets` argument, the
environment variable JUICE_HEAD_SETS, `./head_sets`, the sets shipped with the package. Every
`*/*/head_set.json` there is read; sets that fit the model are served by name, the others are listed
with the reason.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from juice.errors import HeadSetError, HeadSetMismatchError, HeadSetNotFoundError
from juice.head_set.head_set import HeadSet
from juice.head_set.naming import public_id
from juice.head_set.reading import JSON_FILE, SCORES_FILE
from juice.head_set.schema import ModelIdentity
from juice.head_set.scores import HeadScores
from juice.methods import TARGETS, Method, Target

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


@dataclass(frozen=True)
class HeadSetLibrary:
    """The head sets of one folder, seen from one model."""

    folder: Path
    model: ModelIdentity
    by_name: dict[str, HeadSet] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    # The keys of `unfit` whose sets were made for a model of another name.
    foreign: set[str] = field(default_factory=set)
    allow_unverified: bool = False

    @classmethod
    def scan(
        cls, given: str | Path | None, model: ModelIdentity, *, allow_unverified: bool = False
    ) -> HeadSetLibrary:
        """Read every set of the folder.

        A set that cannot be read, is damaged or was made for another model is listed in `unfit`
        with the reason. Of two sets of one name, one of which has the model's fingerprint, that one
        is served.

        Args:
            given: The folder; None: the one that is searched.
            model: The model to serve.
            allow_unverified: Whether to serve sets that fit by architecture and shape alone.

        Raises:
            HeadSetNotFoundError: There is no such folder.
            HeadSetError: Two fitting sets have one name.
        """
        library, found = cls(find_folder(given), model, allow_unverified=allow_unverified), {}
        paths, library_unfit = _sets_in(library.folder)
        library.unfit.update(library_unfit)
        for key, path in paths.items():
            try:
                found[key] = HeadSet.load(path)
            except HeadSetError as error:
                # Whoever asks the server need not know where its files are.
                library.unfit[key] = printable(str(error).replace(str(path), key))
        for key in sorted(found, key=lambda key: not found[key].model.is_certain(model)):
            library._add(key, found[key])
        return library

    def _add(self, key: str, head_set: HeadSet) -> None:
        rival, own = self.by_name.get(head_set.name), head_set.model
        if (
            rival
            and rival.model.is_certain(self.model)
            and not own.is_certain(self.model)
            and not own.difference(self.model)
        ):
            self.unfit[key] = (
                "it has no fingerprint, "
                f"and another head set {rival.name!r} has the fingerprint of {self.model.id}"
            )
            return
        try:
            head_set.check_fits(self.model, allow_unverified=self.allow_unverified)
        except HeadSetError as error:
            self.unfit[key] = str(error)
            if public_id(own.id) != public_id(self.model.id):
                self.foreign.add(key)
            return
        if rival:
            raise HeadSetError(
                f"two head sets in {self.folder} are named {head_set.name!r} and fit "
                f"{self.model.id}; rename or remove one ({key})"
            )
        self.by_name[head_set.name] = head_set

    def targets(self, method: Method = "juice") -> list[Target]:
        """Return the targets that `steer` alone reaches.

        Those are the targets with a set of the same name that has betas for the method.
        """
        own = {target: self.named_after(target) for target in TARGETS}
        return [target for target, found in own.items() if found and found.betas(method)]

    def named_after(self, target: Target) -> HeadSet | None:
        """Return the set that is named after its own target, if there is one."""
        found = self.by_name.get(target)
        return found if found and found.target == target else None

    def get(self, name: str) -> HeadSet:
        """Return the set of that name.

        Raises HeadSetMismatchError for a set that does not fit, HeadSetNotFoundError for no set.
        """
        if name in self.by_name:
            return self.by_name[name]
        for key, reason in self.unfit.items():
            if key.split("/")[1] == name:
                raise HeadSetMismatchError(reason)
        served = ", ".join(sorted(self.by_name)) or "none"
        raise HeadSetNotFoundError(
            f"no head set {name!r} for {self.model.id} (served: {served}); "
            "make one with `juice identify`, or give its folder (--head-sets)"
        )


def _sets_in(folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
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
                found[printable(f"{of_model.name}/{path.name}")] = path
    return found, unreadable


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
    found, _ = _sets_in(folder)
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
