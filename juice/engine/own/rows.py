"""The rows that sequences occupy, layer by layer, and the shelves that hold rows of similar length.

A sequence has a main row in every layer, and a companion in those of its window. The rows of one
kind are a list in which sequences that decode come first and those in prefill after them, so a
decode step takes a contiguous run of slots in every layer.

All slots of a shelf are as long as its longest row may become, and a forward reads as many keys as
its longest row has. So rows that may grow long are kept apart from short ones: on a shelf none may
need more than four times as many positions as another, and half of all positions must be needed.
Each shelf takes a forward of its own, so a request joins one that takes it where there is one. All
share one budget of bytes; one that grows takes what the others do not need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from juice.engine.own.cache import ShelfSize, SlotCache
from juice.engine.own.sequence import Sequence


class RowList:
    """The rows of one kind, in the order of their slots in some layers of the cache."""

    def __init__(self, cache: SlotCache, layers: tuple[int, ...], *, is_main: bool) -> None:
        self.rows: list[Sequence] = []
        self.n_decoding = 0
        self._cache = cache
        self._layers = layers
        self._is_main = is_main

    def join(self, sequence: Sequence) -> None:
        """Give a sequence the last row, among those in prefill."""
        self.rows.append(sequence)

    def start_decoding(self, sequence: Sequence) -> None:
        """Move a sequence from those in prefill to those that decode."""
        row, boundary = self.rows.index(sequence), self.n_decoding
        if row != boundary:
            other = self.rows[boundary]
            self.rows[row], self.rows[boundary] = other, sequence
            n = max(sequence.n_cached, other.n_cached)
            self._cache.swap(self._layers, row, boundary, n, is_main=self._is_main)
        self.n_decoding += 1

    def leave(self, sequence: Sequence) -> None:
        """Free a row: the last decoding one fills its gap, the last of all the gap of that."""
        gap = self.rows.index(sequence)
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

    def erase(self, sequence: Sequence) -> None:
        """Zero a sequence's keys and values here."""
        self._cache.clear(self._layers, self.rows.index(sequence), is_main=self._is_main)


class RowTable:
    """The occupied rows: `mains`, and the `companions` of every layer.

    `version` changes whenever a row does.
    """

    def __init__(self, cache: SlotCache) -> None:
        layers = tuple(range(len(cache.slot_layers)))
        self.mains = RowList(cache, layers, is_main=True)
        self.companions = [RowList(cache, (layer,), is_main=False) for layer in layers]
        self.version = 0

    @property
    def decoding(self) -> list[Sequence]:
        """The sequences that get a token at each step."""
        return self.mains.rows[: self.mains.n_decoding]

    @property
    def prefilling(self) -> list[Sequence]:
        """The sequences in prefill."""
        return self.mains.rows[self.mains.n_decoding :]

    def lists_of(self, sequence: Sequence) -> Iterable[RowList]:
        """Yield the lists in which a sequence has a row."""
        yield self.mains
        for layer in sequence.window:
            yield self.companions[layer]

    def join(self, sequence: Sequence) -> None:
        self.version += 1
        for row_list in self.lists_of(sequence):
            row_list.join(sequence)

    def start_decoding(self, sequence: Sequence) -> None:
        self.version += 1
        for row_list in self.lists_of(sequence):
            row_list.start_decoding(sequence)

    def leave(self, sequence: Sequence) -> None:
        self.version += 1
        for row_list in self.lists_of(sequence):
            row_list.leave(sequence)


# Rows that need fewer positions count as if they needed so many.
SHORTEST = 128
FACTOR = 4


class Shelf:
    """The rows of similar length: who occupies them, and their slots."""

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.table = RowTable(cache)

    def size(self, joining: Iterable[Sequence] = ()) -> ShelfSize:
        """Return the size that its rows need, with those of a request that joins."""
        joining = tuple(joining)
        rows = [*self.table.mains.rows, *joining]
        return ShelfSize(
            len(rows),
            tuple(
                len(row_list.rows) + sum(layer in sequence.window for sequence in joining)
                for layer, row_list in enumerate(self.table.companions)
            ),
            max((row.request.n_positions for row in rows), default=0),
        )

    @property
    def version(self) -> tuple[int, ShelfSize | None]:
        """What the slots of its rows depend on: the rows, and how many slots there are."""
        return self.table.version, self.cache.size

    @property
    def is_empty(self) -> bool:
        """Whether there is no row on it."""
        return not self.table.mains.rows

    def takes(self, sequence: Sequence) -> bool:
        """Return whether a request may have its rows here: beside those there, or in slots left."""
        n_needed, n_positions = _needed(sequence), self.cache.n_positions
        if self.is_empty:
            return not n_positions or _longest(sequence) <= n_positions <= FACTOR * n_needed
        needed = [*map(_needed, self.table.mains.rows), *[n_needed] * len(sequence.rows)]
        longest = max(needed)
        return longest <= FACTOR * min(needed) and len(needed) * longest <= 2 * sum(needed)

    @property
    def n_needed_bytes(self) -> int:
        """The bytes that its rows need."""
        return self.cache.n_bytes(self.size())


class Shelves:
    """All shelves of an engine."""

    def __init__(self, n_layers: int) -> None:
        # The first forward, of a row on a shelf of its own, gives the shapes of keys and values.
        self.first = Shelf(SlotCache(n_layers))
        self.max_bytes: int | None = None
        self._n_layers = n_layers
        self._shelves: list[Shelf] = []
        self._shelf_of: dict[Sequence, Shelf] = {}

    def __iter__(self) -> Iterator[Shelf]:
        return iter(tuple(self._shelves))

    def __getitem__(self, row: Sequence) -> Shelf:
        return self._shelf_of[row]

    def __contains__(self, row: Sequence) -> bool:
        return row in self._shelf_of

    @property
    def rows(self) -> list[Sequence]:
        """The main rows of all shelves."""
        return [row for shelf in self for row in tuple(shelf.table.mains.rows)]

    @property
    def n_running(self) -> int:
        """The number of requests that have their rows."""
        return sum(row.owner is row for row in self.rows)

    @property
    def n_needed_bytes(self) -> int:
        """The bytes that the rows of all shelves need; any thread may read it."""
        return sum(shelf.n_needed_bytes for shelf in self)

    def n_bytes(self, size: ShelfSize) -> int:
        """Return the bytes that slots of a size take on any shelf."""
        return self.first.cache.n_bytes(size)

    @property
    def n_bytes_per_token(self) -> int:
        """The bytes that the keys and values of one unsteered token take, over all layers."""
        return sum(layer.bytes_per_position for layer in self.first.cache.slot_layers)

    def shelf_for(self, sequence: Sequence) -> Shelf:
        """Return the shelf on which a request would have all its rows.

        Of those with rows like its own the one that has to grow least; else an empty one.
        """
        needed = _longest(sequence)
        like = [shelf for shelf in self._shelves if shelf.takes(sequence)]
        if not like:
            like = [Shelf(SlotCache(self._n_layers, self.first.cache))]
            self._shelves += like

        def order(shelf: Shelf) -> tuple[bool, int, int]:
            longest = shelf.cache.n_positions if shelf.is_empty else shelf.size().n_positions
            return shelf.is_empty, max(0, needed - longest), longest

        return min(like, key=order)

    def fits(self, sequence: Sequence) -> bool:
        """Return whether the rows of a request fit into the memory beside those that run."""
        shelf = self.shelf_for(sequence)
        others = self.n_needed_bytes - shelf.n_needed_bytes
        needed = self.n_bytes(shelf.size(sequence.rows))
        return self.max_bytes is None or others + needed <= self.max_bytes

    def join(self, sequence: Sequence) -> None:
        """Give a request its rows.

        Raises SlotsBrokenError, or whatever a failed allocation raises.
        """
        shelf = self.shelf_for(sequence)
        needed = shelf.size(sequence.rows)
        shelf.cache.reserve(needed, self._left_for(shelf, self.n_bytes(needed)))
        for row in sequence.rows:
            self._shelf_of[row] = shelf
            shelf.table.join(row)

    def leave(self, sequence: Sequence) -> None:
        for row in sequence.rows:
            self._shelf_of.pop(row).table.leave(row)

    def clear(self) -> None:
        self._shelves.clear()
        self._shelf_of.clear()

    def free(self) -> None:
        """Give back the memory of the shelves on which there is no row, to other processes, too."""
        idle = [shelf for shelf in self if shelf.is_empty and shelf.cache.n_allocated_bytes]
        for shelf in idle:
            shelf.cache.free()
        if idle and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _left_for(self, shelf: Shelf, n_bytes: int) -> int | None:
        """Return the most bytes that a shelf may take; others give up what they do not need.

        They do so where fewer than `n_bytes` would be left, those with the most to spare first.
        """
        if self.max_bytes is None:
            return None
        others = sorted(
            (other for other in self if other is not shelf),
            key=lambda other: other.n_needed_bytes - other.cache.n_allocated_bytes,
        )
        for other in others:
            if self.max_bytes - sum(other.cache.n_allocated_bytes for other in others) >= n_bytes:
                break
            if other.is_empty:
                other.cache.free()
            else:
                other.cache.resize(other.size())
        return self.max_bytes - sum(other.cache.n_allocated_bytes for other in others)


def _longest(row: Sequence) -> int:
    return max(sequence.request.n_positions for sequence in row.owner.rows)


def _needed(row: Sequence) -> int:
    return max(SHORTEST, _longest(row))
