"""The head sets of a folder that fit a loaded model, by name, and the others with the reason.

The first of these folders that is given or exists is searched: the `head_sets` argument, the
environment variable JUICE_HEAD_SETS, `./head_sets`, the sets shipped with the package. It is read
once, and again when it has changed: a set that cannot be read then is served as it was before.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from juice.errors import HeadSetError, HeadSetMismatchError, HeadSetNotFoundError, WindowError
from juice.formula import TARGETS, Method, Target
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import ModelIdentity, public_id
from juice.head_set.scores import HeadScores
from juice.head_set.storage import JSON_FILE, is_scores_name, read_scores

PACKAGED = Path(__file__).parents[1] / "_head_sets"
CHECKOUT = Path(__file__).parents[2] / "head_sets"


def shipped_folder() -> Path:
    """Return the folder of the sets shipped with JuICE: in the wheel's package or the checkout."""
    return PACKAGED if PACKAGED.is_dir() else CHECKOUT


def find_folder(given: str | Path | None) -> Path:
    """Return the folder to search; raises HeadSetNotFoundError for a named one of no head sets."""
    named = given or os.environ.get("JUICE_HEAD_SETS")
    if named:
        folder = Path(named)
        if not folder.is_dir():
            raise HeadSetNotFoundError(
                f"the head sets folder {named} does not exist; "
                f"make it with `juice identify --out {named}`"
            )
        if any(os.path.lexists(path / JSON_FILE) for path in (folder, *_models_in(folder))):
            raise HeadSetNotFoundError(
                f"{named} is the folder of a head set or of one model; "
                f"give the folder above, which holds <model>/<name>/{JSON_FILE}"
            )
        return folder
    local = Path("head_sets")
    return local if local.is_dir() else shipped_folder()


def sets_in(folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the head sets' folders by `<model>/<name>`, and why others cannot be looked into."""
    folders, unreadable = dict[str, Path](), dict[str, str]()
    for of_model in _models_in(folder):
        try:
            paths = [path for path in _folders_in(of_model) if _may_be_there(path / JSON_FILE)]
        except OSError as error:
            model = printable(of_model.name)
            unreadable[f"{model}/*"] = f"cannot look into {model}: {error.strerror}"
        else:
            folders |= {printable(f"{of_model.name}/{path.name}"): path for path in paths}
    return folders, unreadable


def stamp_of(folder: Path) -> Hashable:
    """Return a value that changes with the sets of a folder: their files' inodes, sizes and times.

    Raises HeadSetNotFoundError.
    """
    paths, unreadable = sets_in(folder)
    files = [
        file
        for path in paths.values()
        for file in (path / JSON_FILE, *sorted(path.glob("scores*.safetensors")))
    ]
    return (*unreadable.items(), *((str(file), _stamp_of(file)) for file in files))


def _stamp_of(file: Path) -> Hashable:
    try:
        status = file.stat()
    except OSError as error:
        return error.errno
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _models_in(folder: Path) -> list[Path]:
    """Return the folders of models in a folder; raises HeadSetNotFoundError."""
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
            Path(entry) for entry in entries if not entry.name.startswith(".") and _is_folder(entry)
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
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)
    return True


def printable(text: str) -> str:
    """Return text as valid Unicode: a file's name may have any bytes, JSON lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def find_head_set(given: str | Path, head_sets: str | Path | None = None) -> tuple[Path, HeadSet]:
    """Return a head set and its folder.

    It is given by its folder, its scores file, or its name (or `<model>/<name>`) in the folder of
    head sets; None is the one that is searched for a model. Raises HeadSetNotFoundError where there
    is none, or several models have one of that name, and HeadSetError for a damaged set.
    """
    path = Path(given)
    if is_scores_name(path.name):
        path = path.parent
    if os.path.lexists(path / JSON_FILE):
        return path, HeadSet.load(path)
    folder, name = find_folder(head_sets), str(given)
    folders, _ = sets_in(folder)
    named = {key: path for key, path in folders.items() if name in (path.name, key)}
    if len(named) == 1:
        (path,) = named.values()
        return path, HeadSet.load(path)
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
        f"its scores file, or a name in {folder} ({', '.join(folders) or 'none'})"
    )


def find_scores(given: str | Path, head_sets: str | Path | None = None) -> HeadScores:
    """Return the scores of a lone file, or of what `find_head_set` finds; raises HeadSetError."""
    path = Path(given)
    if path.is_file() and not (path.parent / JSON_FILE).exists():
        return HeadScores.parse(read_scores(path), path)
    folder, head_set = find_head_set(given, head_sets)
    if head_set.scores is None:
        raise HeadSetError(f"{folder} has no scores; only sets made by `juice identify` have")
    return head_set.scores


@dataclass(frozen=True)
class HeadSetLibrary:
    """The head sets of one folder, seen from one model.

    Args:
        by_name: The sets that are served.
        keys: The `<model>/<folder>` of each of them, by name.
        unfit: Why others are not served, or a set's files cannot be read, by `<model>/<folder>`.
        foreign: Those of `unfit` whose sets were made for a model of another name.
        gone: Names that were served before.
        allow_unverified: Whether sets are served that fit by architecture and shape alone.
        layers: The layers in which the engine can steer by each method; None: all of them.
    """

    folder: Path
    model: ModelIdentity
    by_name: dict[str, HeadSet] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    gone: frozenset[str] = frozenset()
    allow_unverified: bool = False
    layers: Mapping[Method, range] | None = None

    @classmethod
    def scan(
        cls,
        given: str | Path | None,
        model: ModelIdentity,
        *,
        allow_unverified: bool = False,
        layers: Mapping[Method, range] | None = None,
    ) -> HeadSetLibrary:
        """Read every set of a folder; None is the one that is searched.

        A set that cannot be read, is damaged or was made for another model is listed in `unfit`
        with the reason. Of two sets of one name, one of which has the model's fingerprint, that one
        is served. Raises HeadSetNotFoundError without such a folder, and HeadSetError where two
        fitting sets have one name.
        """
        folder = find_folder(given)
        return cls(folder, model, allow_unverified=allow_unverified, layers=layers).again()

    def again(self) -> HeadSetLibrary:
        """Read the folder again as `scan` does; a set that is the same stays the same object.

        So does one that is there but cannot be read.
        """
        paths, unreadable = sets_in(find_folder(self.folder))
        fresh = replace(self, by_name={}, keys={}, unfit=unreadable, foreign=set())
        before = {key: self.by_name[name] for name, key in self.keys.items()}
        # Those whose model's folder cannot be looked into stay as well.
        readable = {k: old for k, old in before.items() if f"{k.split('/')[0]}/*" in unreadable}
        for key, path in paths.items():
            old = before.get(key)
            try:
                new = HeadSet.load(path)
                readable[key] = old if old and old.seal == new.seal else new
            except HeadSetError as error:
                # Whoever asks the server need not know where its files are.
                fresh.unfit[key] = printable(str(error).replace(str(path), key))
                if old is not None:
                    readable[key] = old
                    fresh.unfit[key] += "; the set that was read before is still served"
        certain_first = sorted(
            readable.items(), key=lambda item: not item[1].model.is_certain(self.model)
        )
        for key, head_set in certain_first:
            fresh._add(key, head_set)
        return replace(fresh, gone=(self.gone | set(self.by_name)) - set(fresh.by_name))

    def _add(self, key: str, head_set: HeadSet) -> None:
        rival, model = self.by_name.get(head_set.name), head_set.model
        is_guess = not (model.is_certain(self.model) or model.difference(self.model))
        if rival and rival.model.is_certain(self.model) and is_guess:
            self.unfit[key] = (
                "it has no fingerprint, "
                f"and another head set {rival.name!r} has the fingerprint of {self.model.id}"
            )
            return
        try:
            self.check_fits(head_set)
        except HeadSetError as error:
            self.unfit[key] = str(error)
            if public_id(model.id) != public_id(self.model.id):
                self.foreign.add(key)
            return
        if rival:
            raise HeadSetError(
                f"two head sets in {self.folder} are named {head_set.name!r} and fit "
                f"{self.model.id}; rename or remove one ({key})"
            )
        self.by_name[head_set.name] = head_set
        self.keys[head_set.name] = key

    def check_fits(self, head_set: HeadSet) -> None:
        """Raise HeadSetMismatchError for a set of another model, WindowError for other layers."""
        head_set.check_fits(self.model, allow_unverified=self.allow_unverified)
        if self.layers is None:
            return
        # In one layer the clean run and the steered one read the same.
        needed = head_set.layers
        in_two = head_set.method == "juice" and len(needed) > 1
        here = self.layers["juice" if in_two else "june"]
        if not {*needed} <= {*here}:
            steers = f"layers {here.start} to {here.stop - 1}" if here else "no layer"
            window = [*needed, *self.layers["juice"]]
            raise WindowError(
                f"the heads of {head_set.name!r} are in layers {min(needed)} to {max(needed)}, and "
                f"in {'two runs' if in_two else 'one run'} this engine steers {steers}: start it "
                f"with --window {min(window)}-{max(window)} or --window all, or anew with the set "
                "in its folder"
            )

    def targets(self, method: Method | None = None) -> list[Target]:
        """Return the targets with a set of that name and betas for a method; None: its own one."""
        named = {target: self.named_after(target) for target in TARGETS}
        return [target for target, head_set in named.items() if head_set and head_set.betas(method)]

    def named_after(self, target: Target) -> HeadSet | None:
        """Return the set that is named after its own target, if there is one."""
        head_set = self.by_name.get(target)
        return head_set if head_set and head_set.target == target else None

    def get(self, name: str) -> HeadSet:
        """Return a set; raises HeadSetMismatchError where it does not fit, HeadSetNotFoundError."""
        if name in self.by_name:
            return self.by_name[name]
        for key, reason in self.unfit.items():
            is_another = name in self.gone and key in self.foreign
            if key.split("/")[1] == name and not is_another:
                raise HeadSetMismatchError(reason)
        served = ", ".join(sorted(self.by_name)) or "none"
        if name in self.gone:
            raise HeadSetNotFoundError(
                f"the head set {name!r} was removed while this server ran (served: {served}); name "
                "another one"
            )
        raise HeadSetNotFoundError(
            f"no head set {name!r} for {self.model.id} (served: {served}); "
            "make one with `juice identify`, or give its folder (--head-sets)"
        )
