"""The head sets that a server serves, as their folder changes.

Every server looks at its folder each second, so those that share one follow each other. What cannot
be read leaves the set that was read before, and a folder with which the server would not start
leaves all of them; requests keep the set that they began with.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path

from juice import HeadSet
from juice.errors import (
    HeadSetError,
    HeadSetMismatchError,
    HeadSetNotFoundError,
    JuiceError,
    OutputError,
    UsageError,
    WindowError,
)
from juice.head_set import HeadSetLibrary, storage
from juice.head_set.lookup import stamp_of
from juice.head_set.naming import slug
from juice.head_set.reading import JSON_FILE
from juice.head_set.writing import remove
from juice_server.conditions import Conditions
from juice_server.errors import ConflictError, StorageError, StorageFullError
from juice_server.keys import Keys
from juice_server.settings import Settings
from juice_server.telemetry.metrics import Change, Metrics

POLL_S = 1.0
# No room on the disk, in the quota, or in the largest file that may be written.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DAMAGED = ""
LOG = logging.getLogger("juice_server")


def check_setting(settings: Settings, keys: Keys | None) -> None:
    """Raise UsageError where head sets may be changed, but not by anyone, or not anywhere."""
    if not settings.allow_head_set_changes:
        return
    if keys is None or not keys.may_any("admin"):
        raise UsageError(
            "allow_head_set_changes is on, but no key may do it: whoever changes a head set changes"
            ' everybody\'s answers. Give a key with scopes = ["admin"] in a .toml file'
            " (--api-keys-file)"
        )
    if settings.head_sets is None:
        raise UsageError(
            "allow_head_set_changes is on, but no folder is given; name the one that may be changed"
            " (--head-sets)"
        )


def check_start(sets: HeadSetLibrary, settings: Settings) -> None:
    """Raise UsageError for a folder with which the server does not start."""
    check_defaults(sets, settings)
    if settings.allow_head_set_changes and not os.access(sets.folder, os.W_OK | os.X_OK):
        raise UsageError(
            f"allow_head_set_changes is on, but {sets.folder} cannot be written to; make it"
            " writable, or leave the setting off"
        )


def check_defaults(sets: HeadSetLibrary, settings: Settings) -> None:
    """Raise UsageError for sets that lack what requests need that do not say how to be steered."""
    default = settings.default_steer
    if default != "none" and default not in sets.targets():
        lacks = (
            "has betas: set them with `juice tune`"
            if default in sets.by_name
            else f"fits {sets.model.id}"
        )
        raise UsageError(
            f"default_steer is {default}, but no head set of that name in {sets.folder} {lacks}"
        )
    ungated = [name for name in sets.targets() if sets.get(name).gate() is None]
    if settings.default_gate == "auto" and ungated:
        raise UsageError(
            f"default_gate is auto, but {' and '.join(ungated)} in {sets.folder} have no gate: "
            "measure it with `juice tune`, or leave --default-gate off"
        )


class HeadSetFolder:
    """The folder of a server's head sets.

    Args:
        library: The sets that are served.
        settings: What requests are steered by that do not say it, for which there must be sets.
        metrics: Counts what changes.
        serve: Serves other sets from now on.
    """

    def __init__(
        self,
        library: HeadSetLibrary,
        settings: Settings,
        metrics: Metrics,
        serve: Callable[[HeadSetLibrary], None],
    ) -> None:
        self.library = library
        self.problem: str | None = None
        self._settings, self._metrics, self._serve = settings, metrics, serve
        self._stamp: Hashable = None
        self._is_settled = False
        self._reading = asyncio.Lock()

    async def follow(self) -> None:
        """Serve what the folder holds, whatever changes it."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Serve what the folder holds now, where that has changed."""
        async with self._reading:
            try:
                fresh = await asyncio.to_thread(self._read)
            except Exception as error:
                self._stamp = None  # so it is read again
                if (problem := self._said(error)) != self.problem:
                    unexpected = None if isinstance(error, JuiceError) else error
                    LOG.error("the head sets stay as they are: %s", problem, exc_info=unexpected)
                self.problem = problem
            else:
                if fresh is not None:
                    self.problem = None
                    self._take(fresh)

    def _read(self) -> HeadSetLibrary | None:
        """Return what the folder holds; None where it has not changed.

        It is read once more a moment later: what is written within one tick of the file system's
        clock may leave no trace.
        """
        stamp = stamp_of(self.library.folder)
        is_same = stamp == self._stamp
        if is_same and self._is_settled:
            return None
        self._stamp, self._is_settled = stamp, is_same
        fresh = self.library.again()
        check_defaults(fresh, self._settings)
        return fresh

    def _take(self, fresh: HeadSetLibrary) -> None:
        before, self.library = self.library, fresh
        changes: list[tuple[Change, str]] = []
        for name in sorted({*before.by_name, *fresh.by_name}):
            old, new = before.by_name.get(name), fresh.by_name.get(name)
            if old is not new:
                changes.append(("removed" if new is None else "changed" if old else "added", name))
        for change, name in changes:
            self._metrics.head_set_changed(change)
            fields = {"head_set": name}
            if (own := fresh.by_name.get(name)) is not None:
                fields |= {"target": own.target, "sha256": own.seal}
            LOG.info("head set %s", change, extra={"fields": fields})
        for key, reason in fresh.unfit.items():
            if key not in fresh.foreign and before.unfit.get(key) != reason:
                LOG.warning("head set not usable", extra={"fields": {"path": key, "why": reason}})
        self._serve(fresh)

    def put(self, head_set: HeadSet, conditions: Conditions) -> bool:
        """Write a head set that fits, in a thread; return whether it is a new one.

        Raises:
            ConflictError: It does not go with the server's settings, or with what is there.
            PreconditionError: What is there is not what the client expects.
            StorageError: It cannot be written.
        """
        fresh, was_there = self._fresh(), False
        self._check_change(replace(fresh, by_name=fresh.by_name | {head_set.name: head_set}))
        path = self._path(fresh, head_set.name)

        def check() -> None:
            nonlocal was_there
            found = self._found(path, head_set.name)
            conditions.check(head_set.name, found)
            was_there = found is not None

        try:
            storage.save(head_set, path, overwrite=True, check=check)
        except OutputError as error:
            raise self._failed(head_set.name, error) from error
        return not was_there

    def delete(self, name: str, conditions: Conditions) -> None:
        """Remove a head set, in a thread.

        Raises what `put` raises, and HeadSetNotFoundError where there is none.
        """
        fresh = self._fresh()
        rest = {other: own for other, own in fresh.by_name.items() if other != name}
        path = self._path(fresh, name)

        def check() -> None:
            found = self._found(path, name)
            conditions.check(name, found)
            if found is None:
                error = HeadSetNotFoundError(f"there is no head set {name!r}; see /v1/head_sets")
                error.param = "name"
                raise error

        check()
        self._check_change(replace(fresh, by_name=rest))
        try:
            remove(path, check=check)
        except OutputError as error:
            raise self._failed(name, error) from error

    def _fresh(self) -> HeadSetLibrary:
        try:
            return self.library.again()
        except HeadSetError as error:
            raise ConflictError(f"nothing was changed: {self._said(error)}") from error

    def _check_change(self, sets: HeadSetLibrary) -> None:
        try:
            check_defaults(sets, self._settings)
        except UsageError as error:
            raise ConflictError(f"nothing was changed: {self._said(error)}") from error

    def _path(self, sets: HeadSetLibrary, name: str) -> Path:
        """Return the folder of a set: where it is, or where it would be."""
        return sets.paths.get(name, sets.folder / slug(sets.model.id) / name)

    def _found(self, path: Path, name: str) -> str | None:
        """Return the hash of the set in a folder, DAMAGED for a damaged one, None for none.

        Raises ConflictError for a set that is not this server's to change.
        """
        if not os.path.lexists(path / JSON_FILE):
            return None
        try:
            own = HeadSet.load(path)
        except HeadSetError:
            return DAMAGED
        other = None if own.name == name else f"it is named {own.name!r}"
        try:
            self.library.check_fits(own)
        except WindowError:
            pass  # this model's, and made to be steered by another engine
        except HeadSetMismatchError as error:
            other = str(error)
        if other is not None:
            raise ConflictError(
                f"in the folder of {name!r} there is another set, which this server does not "
                f"serve: {other}; move it by hand, or choose another name"
            )
        return own.seal

    def _failed(self, name: str, error: OutputError) -> JuiceError:
        cause = error.__cause__
        if not isinstance(cause, OSError):
            return ConflictError(f"nothing was changed: {self._said(error)}")
        if cause.errno in FULL:
            return StorageFullError(
                f"there is no room for the head set {name!r} ({cause.strerror}); nothing was "
                "changed: make room in the server's folder of head sets, and send it again"
            )
        return StorageError(
            f"the head set {name!r} cannot be written ({cause.strerror}); nothing was changed: the "
            "server's folder of head sets must be writable"
        )

    def _said(self, error: Exception) -> str:
        """Return what an error says, without where the server's files are."""
        folder = self.library.folder
        text = str(error) if isinstance(error, JuiceError) else repr(error)
        return text.replace(str(folder.resolve()), folder.name).replace(str(folder), folder.name)
