"""The head sets of a folder that fit a loaded model, by name, and the others with the reason.

A folder is read once, and again when it has changed: a set that cannot be read then is served as it
was before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from juice.errors import HeadSetError, HeadSetMismatchError, HeadSetNotFoundError, WindowError
from juice.head_set.coefficients import layers_of
from juice.head_set.head_set import HeadSet
from juice.head_set.lookup import find_folder, key_of, printable, sets_in
from juice.head_set.naming import public_id
from juice.head_set.schema import ModelIdentity
from juice.methods import TARGETS, Method, Target


@dataclass(frozen=True)
class HeadSetLibrary:
    """The head sets of one folder, seen from one model.

    Args:
        folder: The folder.
        model: The model.
        by_name: The sets that are served.
        paths: The folder of each of them, by name.
        unfit: Why others are not served, or a set's files cannot be read, by `<model>/<folder>`.
        foreign: Those of `unfit` whose sets were made for a model of another name.
        gone: Names that were served before.
        allow_unverified: Whether sets are served that fit by architecture and shape alone.
        layers: The layers in which the engine can steer; None: all of them.
    """

    folder: Path
    model: ModelIdentity
    by_name: dict[str, HeadSet] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    gone: frozenset[str] = frozenset()
    allow_unverified: bool = False
    layers: range | None = None

    @classmethod
    def scan(
        cls,
        given: str | Path | None,
        model: ModelIdentity,
        *,
        allow_unverified: bool = False,
        layers: range | None = None,
    ) -> HeadSetLibrary:
        """Read every set of the folder.

        A set that cannot be read, is damaged or was made for another model is listed in `unfit`
        with the reason. Of two sets of one name, one of which has the model's fingerprint, that one
        is served.

        Args:
            given: The folder; None: the one that is searched.
            model: The model to serve.
            allow_unverified: Whether to serve sets that fit by architecture and shape alone.
            layers: The layers in which the engine can steer; None: all of them.

        Raises:
            HeadSetNotFoundError: There is no such folder.
            HeadSetError: Two fitting sets have one name.
        """
        folder = find_folder(given)
        return cls(folder, model, allow_unverified=allow_unverified, layers=layers).again()

    def again(self) -> HeadSetLibrary:
        """Read the folder again; a set that is there but cannot be read stays as it was.

        A set that is the same stays the same object. Raises what `scan` raises.
        """
        paths, unreadable = sets_in(find_folder(self.folder))
        own = replace(self, by_name={}, paths={}, unfit=unreadable, foreign=set())
        before = {key_of(path): (path, self.by_name[name]) for name, path in self.paths.items()}
        found: dict[str, tuple[Path, HeadSet]] = {}
        for key, path in paths.items():
            old = before.get(key)
            try:
                new = HeadSet.load(path)
                found[key] = old if old and old[1].seal == new.seal else (path, new)
            except HeadSetError as error:
                # Whoever asks the server need not know where its files are.
                own.unfit[key] = printable(str(error).replace(str(path), key))
                if old is not None:
                    found[key] = old
                    own.unfit[key] += "; the set that was read before is still served"
        # Those whose folder, too, cannot be looked into.
        found |= {
            key: old for key, old in before.items() if f"{old[0].parent.name}/*" in unreadable
        }
        for key, (path, head_set) in sorted(
            found.items(), key=lambda one: not one[1][1].model.is_certain(self.model)
        ):
            own._add(key, path, head_set)
        return replace(own, gone=(self.gone | set(self.by_name)) - set(own.by_name))

    def _add(self, key: str, path: Path, head_set: HeadSet) -> None:
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
            self.check_fits(head_set)
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
        self.paths[head_set.name] = path

    def check_fits(self, head_set: HeadSet) -> None:
        """Raise HeadSetMismatchError unless a set was made for the model.

        Raises WindowError for heads in layers in which the engine cannot steer.
        """
        head_set.check_fits(self.model, allow_unverified=self.allow_unverified)
        needed = layers_of(head_set)
        if self.layers is not None and any(layer not in self.layers for layer in needed):
            all_of_them = (*needed, *self.layers)
            raise WindowError(
                f"the heads of {head_set.name!r} are in layers {min(needed)} to {max(needed)}, and "
                f"this engine steers {spelled(self.layers)}: start it with --window "
                f"{min(all_of_them)}-{max(all_of_them)} or --window all, or anew with the set in "
                "its folder"
            )

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


def spelled(layers: range) -> str:
    """Return layers as words."""
    return f"layers {layers.start} to {layers.stop - 1}" if layers else "no layer"
