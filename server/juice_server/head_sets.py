"""The head sets that a server serves, as their folder changes.

Every server looks at its folder each second, so those that share one follow each other. What cannot
be read leaves the set that was read before, and a folder with which the server would not start
leaves all of them; requests keep the set that they began with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable

from juice.errors import JuiceError, UsageError
from juice.head_set.library import HeadSetLibrary, stamp_of
from juice_server.settings import Settings
from juice_server.telemetry.metrics import Change, Metrics

POLL_S = 1.0
LOG = logging.getLogger("juice_server")


def check_start(sets: HeadSetLibrary, settings: Settings) -> None:
    """Raise UsageError for head sets that cannot serve the default steer and gate."""
    default = settings.default_steer
    if default != "none" and default not in sets.targets():
        is_there = default in sets.by_name
        lacks = "has betas: set them with `juice tune`" if is_there else f"fits {sets.model.id}"
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
    """The folder of the head sets that are served; `serve` gets other ones when it changes."""

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

    async def follow(self) -> None:
        """Serve what the folder holds, whatever changes it."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Serve what the folder holds now, where that has changed."""
        try:
            fresh = await asyncio.to_thread(self._read)
        except Exception as error:
            self._stamp = None  # so it is read again
            if (problem := self._said(error)) != self.problem:
                unexpected = None if isinstance(error, JuiceError) else error
                LOG.error("the head sets stay as they are: %s", problem, exc_info=unexpected)
            self.problem = problem
            return
        if fresh is not None:
            self.problem = None
            self._serve_from_now(fresh)

    def _read(self) -> HeadSetLibrary | None:
        """Return what the folder holds; None where it has not changed.

        It is read once more a moment later: a second write within a tick of the file system's clock
        leaves no trace.
        """
        stamp = stamp_of(self.library.folder)
        is_same = stamp == self._stamp
        if is_same and self._is_settled:
            return None
        self._stamp, self._is_settled = stamp, is_same
        fresh = self.library.again()
        check_start(fresh, self._settings)
        return fresh

    def _serve_from_now(self, fresh: HeadSetLibrary) -> None:
        """Serve other sets; log and count what changed."""
        before, self.library = self.library, fresh
        for name in sorted({*before.by_name, *fresh.by_name}):
            old, new = before.by_name.get(name), fresh.by_name.get(name)
            if old is new:
                continue
            change: Change = "removed" if new is None else "changed" if old else "added"
            self._metrics.head_set_changed(change)
            details = {} if new is None else {"target": new.target, "sha256": new.seal}
            LOG.info("head set %s", change, extra={"fields": {"head_set": name, **details}})
        for key, reason in fresh.unfit.items():
            if key not in fresh.foreign and before.unfit.get(key) != reason:
                LOG.warning("head set not usable", extra={"fields": {"path": key, "why": reason}})
        self._serve(fresh)

    def _said(self, error: Exception) -> str:
        """Return what an error says, without where the server's files are."""
        folder = self.library.folder
        text = str(error) if isinstance(error, JuiceError) else repr(error)
        return text.replace(str(folder.resolve()), folder.name).replace(str(folder), folder.name)
