"""Who occupies which row of the batch, layer by layer.

A generation has a main row in every layer. With the dual run it also has a companion, its clean
row, but only from its lowest to its highest steered layer: below these the two are the same, above
nothing reads the companion, and with one steered layer the clean z is the main row's own. Each kind
of row has lanes: generations that decode come first, those in prefill after them, so a decode step
takes a contiguous run of slots in every layer.
"""

from __future__ import annotations

from collections.abc import Iterable

from juice.batching.generation import Generation
from juice.batching.slots import SlotCache


class Lane:
    """The places of one kind of row, and their slots in these layers of the cache."""

    def __init__(self, cache: SlotCache, layers: tuple[int, ...], *, is_main: bool) -> None:
        self.rows: list[Generation] = []
        self.n_decoding = 0
        self._cache = cache
        self._layers = layers
        self._is_main = is_main

    def join(self, generation: Generation) -> None:
        """Give a generation the last place, among those in prefill."""
        self.rows.append(generation)

    def start_decoding(self, generation: Generation) -> None:
        """Move a generation from those in prefill to those that decode."""
        place, boundary = self.rows.index(generation), self.n_decoding
        if place != boundary:
            other = self.rows[boundary]
            self.rows[place], self.rows[boundary] = other, generation
            n = max(generation.n_cached, other.n_cached)
            self._cache.swap(self._layers, place, boundary, n, is_main=self._is_main)
        self.n_decoding += 1

    def leave(self, generation: Generation) -> None:
        """Free a generation's place.

        The last decoding row fills the gap of a decoding one; the last row of all fills the gap
        that remains.
        """
        gap = self.rows.index(generation)
        if gap < self.n_decoding:
            self.n_decoding -= 1
            gap = self._fill(gap, self.n_decoding)
        self._fill(gap, len(self.rows) - 1)
        self.rows.pop()

    def _fill(self, gap: int, source: int) -> int:
        if gap != source:
            self.rows[gap] = self.rows[source]
            n = self.rows[source].n_cached
            self._cache.copy(self._layers, source, gap, n, is_main=self._is_main)
        return source

    def erase(self, generation: Generation) -> None:
        """Zero what a generation has cached here."""
        self._cache.clear(self._layers, self.rows.index(generation), is_main=self._is_main)


class RowTable:
    """The occupied rows: `mains`, and the `companions` of every layer.

    `version` changes whenever a row does.
    """

    def __init__(self, cache: SlotCache) -> None:
        layers = tuple(range(len(cache.slot_layers)))
        self.mains = Lane(cache, layers, is_main=True)
        self.companions = [Lane(cache, (layer,), is_main=False) for layer in layers]
        self.version = 0

    @property
    def decoding(self) -> list[Generation]:
        """The generations that get a token at each step."""
        return self.mains.rows[: self.mains.n_decoding]

    @property
    def prefilling(self) -> list[Generation]:
        """The generations in prefill."""
        return self.mains.rows[self.mains.n_decoding :]

    def lanes(self, generation: Generation) -> Iterable[Lane]:
        """Yield the lanes in which a generation has a row."""
        yield self.mains
        for layer in generation.window:
            yield self.companions[layer]

    def join(self, generation: Generation) -> None:
        """Give a generation its rows."""
        self.version += 1
        for lane in self.lanes(generation):
            lane.join(generation)

    def start_decoding(self, generation: Generation) -> None:
        """Record that a generation's prefill is over."""
        self.version += 1
        for lane in self.lanes(generation):
            lane.start_decoding(generation)

    def leave(self, generation: Generation) -> None:
        """Free the rows of a generation."""
        self.version += 1
        for lane in self.lanes(generation):
            lane.leave(generation)
