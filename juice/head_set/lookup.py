"""The head sets that serve a loaded model.

Folders are searched in this order, the first that is given or exists wins: the `head_sets` argument, the environment
variable JUICE_HEAD_SETS, `./head_sets`, the sets shipped with the package. Every `*/*/head_set.json` there is read;
sets that fit the model are served by name, the others are listed with the reason.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from juice.errors import HeadSetError, HeadSetMismatchError, HeadSetNotFoundError
from juice.head_set.schema import HeadSet, ModelIdentity
from juice.head_set.storage import JSON_FILE

PACKAGED = Path(__file__).parents[1] / "_head_sets"
CHECKOUT = Path(__file__).parents[2] / "head_sets"


def shipped_folder() -> Path:
    """Return the folder of the sets that come with JuICE: in a wheel beside the code, in a checkout at its root."""
    return PACKAGED if PACKAGED.is_dir() else CHECKOUT


def find_folder(given: str | Path | None) -> Path:
    """Return the folder to search; raises HeadSetNotFoundError when one is named that does not exist."""
    named = given or os.environ.get("JUICE_HEAD_SETS")
    if named:
        if any((Path(named) / below / JSON_FILE).exists() for below in (".", *(p.name for p in Path(named).glob("[!.]*")))):
            raise HeadSetNotFoundError(
                f"{named} is a head set or one model's; give the folder above, which holds <model>/<name>/{JSON_FILE}"
            )
        if not Path(named).is_dir():
            raise HeadSetNotFoundError(f"the head sets folder {named} does not exist; make it with `juice identify --out {named}`")
        return Path(named)
    local = Path("head_sets")
    return local if local.is_dir() else shipped_folder()


def slug(model_id: str) -> str:
    """Return the folder name of a model's head sets: its id with `/` as `--`, a path's last part."""
    is_path = model_id.startswith((".", "/", "~")) or Path(model_id).is_dir()
    return Path(model_id).resolve().name if is_path else model_id.replace("/", "--")


@dataclass(frozen=True)
class HeadSetLibrary:
    """The head sets of one folder, seen from one model."""

    folder: Path
    model: ModelIdentity
    by_name: dict[str, HeadSet] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)

    @classmethod
    def scan(cls, given: str | Path | None, model: ModelIdentity) -> HeadSetLibrary:
        """Read every set of the folder; raises HeadSetError for two fitting sets of one name.

        A set that is damaged or made for another model is listed in `unfit` with the reason. A set that fits by
        architecture and shape alone, for want of a fingerprint, is served with a warning.
        """
        library = cls(find_folder(given), model)
        for path in sorted(library.folder.glob(f"[!.]*/[!.]*/{JSON_FILE}")):
            library._add(path.parent)
        return library

    def _add(self, folder: Path) -> None:
        key = f"{folder.parent.name}/{folder.name}"
        try:
            head_set = HeadSet.load(folder)
            head_set.check_fits(self.model)
        except HeadSetError as error:
            self.unfit[key] = str(error)
            return
        if head_set.name in self.by_name:
            raise HeadSetError(
                f"two head sets in {self.folder} are named {head_set.name!r} and fit {self.model.id}; rename or remove one ({key})"
            )
        self.by_name[head_set.name] = head_set

    def get(self, name: str) -> HeadSet:
        """Return the set of that name; raises HeadSetMismatchError for one that is there but does not fit."""
        if name in self.by_name:
            return self.by_name[name]
        for key, reason in self.unfit.items():
            if key.split("/")[1] == name:
                raise HeadSetMismatchError(reason)
        served = ", ".join(sorted(self.by_name)) or "none"
        raise HeadSetNotFoundError(
            f"no head set {name!r} for {self.model.id} in {self.folder} (served: {served}); make one with `juice identify`"
        )
