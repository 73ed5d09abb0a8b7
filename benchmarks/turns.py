"""Ways that take turns, each in a process of its own: what is found as it is found.

A way that fails loses its place and what it was at; the others go on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.workers import Worker


class Turns:
    """The ways that run, and what was found of each.

    Args:
        start: Starts a way.
        n_rounds: Over how many rounds a median is taken; one to warm up goes before them.
    """

    def __init__(self, start: Callable[[str], Worker], n_rounds: int) -> None:
        self.ways: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self._start, self._n_rounds = start, n_rounds
        self._workers: dict[str, Worker] = {}
        self._times: dict[str, dict[str, list[float]]] = {}

    def admit(self, group: Iterable[str]) -> None:
        """Let the ways of a group run, and no others; one that runs already goes on."""
        names = [name for name in group if name not in self.failed]
        for name in [own for own in self._workers if own not in names]:
            self._workers.pop(name).close()
        for name in names:
            if name in self._workers:
                continue
            try:
                self._workers[name] = self._start(name)
            except RuntimeError as error:
                self.failed[name] = f"it did not start: {error}"
                continue
            ready_s = round(self._workers[name].ready_s, 2)
            self.ways[name] = {"ready_s": ready_s, "memory_bytes": None, "seconds": {}}
            self._times[name] = {}

    def measure(
        self, n_rows: int, takes: Callable[[str], bool], report: Callable[[str], None]
    ) -> None:
        """Ask each way that takes so many rows, in turns."""
        parts = (f"prompts {n_rows}", f"step {n_rows}")
        for round_number in range(self._n_rounds + 1):
            what = f"round {round_number} of {self._n_rounds}" if round_number else "warm-up"
            report(f"{n_rows} at once: {what}")
            for name in filter(takes, tuple(self._workers)):
                try:
                    answers = [self._workers[name].ask(part) for part in parts]
                except RuntimeError as error:
                    self._fail(name, f"with {n_rows} at once it failed: {error}", parts)
                    continue
                self._workers[name].rest()
                self.ways[name]["memory_bytes"] = answers[-1][1]
                if round_number:
                    for part, (seconds, _) in zip(parts, answers, strict=True):
                        self._times[name].setdefault(part, []).append(seconds)
        for name, times in self._times.items():
            self.ways[name]["seconds"] = {
                part: round(statistics.median(own), 5) for part, own in times.items()
            }

    def close(self) -> None:
        """End all ways."""
        while self._workers:
            self._workers.popitem()[1].close()

    def _fail(self, name: str, reason: str, parts: Iterable[str]) -> None:
        self.failed[name] = reason
        self._workers.pop(name).close()
        for part in parts:
            self._times[name].pop(part, None)
