"""The memory for keys and values: a shelf for rows of similar length.

All slots of a shelf are as long as its longest row may become, and a forward reads as many keys as
its longest row has. So rows that may grow long are kept apart from short ones: on a shelf none may
need more than four times as many positions as another, and half of all positions must be needed.
Each shelf takes a forward of its own, so a request joins one that takes it where there is one. The
shelves share one budget; one that grows takes what the others do not need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from juice.batching.generation import Generation
from juice.batching.room import Room
from juice.batching.rows import RowTable
from juice.batching.slots import SlotCache

# Rows that need fewer positions count as if they needed so many.
SHORTEST = 128
FACTOR = 4


class Shelf:
    """The rows of similar length: who occupies them, and their slots."""

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.table = RowTable(cache)

    def room(self, joining: Iterable[Generation] = ()) -> Room:
        """Return the room that its rows need, with those of a request that joins."""
        joining = tuple(joining)
        rows = [*self.table.mains.rows, *joining]
        return Room(
            len(rows),
            tuple(
                len(lane.rows) + sum(layer in own.window for own in joining)
                for layer, lane in enumerate(self.table.companions)
            ),
            max((own.request.n_positions for own in rows), default=0),
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is no row on it."""
        return not self.table.mains.rows

    def takes(self, generation: Generation) -> bool:
        """Return whether a request may have its rows here: beside those there, or in slots left."""
        own, slots = _needed(generation), self.cache.n_positions
        if self.is_empty:
            return not slots or _longest(generation) <= slots <= FACTOR * own
        needed = [*map(_needed, self.table.mains.rows), *[own] * len(generation.rows)]
        longest = max(needed)
        return longest <= FACTOR * min(needed) and len(needed) * longest <= 2 * sum(needed)

    @property
    def n_needed_bytes(self) -> int:
        """The bytes that its rows need."""
        return self.cache.n_bytes(self.room())


class Shelves:
    """All shelves of an engine.

    Args:
        n_layers: The number of layers.
    """

    def __init__(self, n_layers: int) -> None:
        # The first forward, of a row on a shelf of its own, gives the shapes of keys and values.
        self.first = Shelf(SlotCache(n_layers))
        self.max_bytes: int | None = None
        self._n_layers = n_layers
        self._shelves: list[Shelf] = []
        self._shelf_of: dict[Generation, Shelf] = {}

    def __iter__(self) -> Iterator[Shelf]:
        return iter(tuple(self._shelves))

    def __getitem__(self, row: Generation) -> Shelf:
        """Return the shelf of a row that runs."""
        return self._shelf_of[row]

    def __contains__(self, row: Generation) -> bool:
        """Return whether a row runs."""
        return row in self._shelf_of

    @property
    def rows(self) -> list[Generation]:
        """The main rows of all shelves."""
        return [row for shelf in self for row in tuple(shelf.table.mains.rows)]

    @property
    def n_needed_bytes(self) -> int:
        """The bytes that the rows of all shelves need; any thread may read it."""
        return sum(shelf.n_needed_bytes for shelf in self)

    def n_bytes(self, room: Room) -> int:
        """Return the bytes that a room takes on any shelf."""
        return self.first.cache.n_bytes(room)

    @property
    def n_bytes_per_token(self) -> int:
        """The bytes that the keys and values of one unsteered token take, over all layers."""
        return sum(layer.bytes_per_position for layer in self.first.cache.slot_layers)

    def shelf_for(self, generation: Generation) -> Shelf:
        """Return the shelf on which a request would have all its rows.

        Of those with rows like its own the one that has to grow least; else an empty one.
        """
        needed = _longest(generation)
        like = [own for own in self._shelves if own.takes(generation)]
        if not like:
            like = [Shelf(SlotCache(self._n_layers, self.first.cache))]
            self._shelves += like

        def order(shelf: Shelf) -> tuple[bool, int, int]:
            longest = shelf.cache.n_positions if shelf.is_empty else shelf.room().n_positions
            return shelf.is_empty, max(0, needed - longest), longest

        return min(like, key=order)

    def fits(self, generation: Generation) -> bool:
        """Return whether the rows of a request fit into the memory beside those that run."""
        shelf = self.shelf_for(generation)
        others = self.n_needed_bytes - shelf.n_needed_bytes
        needed = self.n_bytes(shelf.room(generation.rows))
        return self.max_bytes is None or others + needed <= self.max_bytes

    def join(self, generation: Generation) -> None:
        """Give a request its rows.

        Raises SlotsBrokenError, or whatever a failed allocation raises.
        """
        shelf = self.shelf_for(generation)
        needed = shelf.room(generation.rows)
        shelf.cache.reserve(needed, self._left_for(shelf, self.n_bytes(needed)))
        for row in generation.rows:
            self._shelf_of[row] = shelf
            shelf.table.join(row)

    def leave(self, generation: Generation) -> None:
        """Free the rows of a request."""
        for row in generation.rows:
            self._shelf_of.pop(row).table.leave(row)

    def clear(self) -> None:
        """Forget all rows."""
        self._shelves.clear()
        self._shelf_of.clear()

    def free(self) -> None:
        """Give back the memory of the shelves on which there is no row."""
        for shelf in self:
            if shelf.is_empty:
                shelf.cache.free()

    def _left_for(self, shelf: Shelf, n_bytes: int) -> int | None:
        """Return the most bytes that a shelf may take; others give up what they do not need.

        They do so where fewer than `n_bytes` would be left, those with the most to spare first.
        """
        if self.max_bytes is None:
            return None
        others = sorted(
            (own for own in self if own is not shelf),
            key=lambda own: own.n_needed_bytes - own.cache.n_allocated_bytes,
        )
        for other in others:
            if self.max_bytes - sum(own.cache.n_allocated_bytes for own in others) >= n_bytes:
                break
            if other.is_empty:
                other.cache.free()
            else:
                other.cache.resize(other.room())
        return self.max_bytes - sum(own.cache.n_allocated_bytes for own in others)


def _longest(row: Generation) -> int:
    """Return how many positions the longest row of a request may need."""
    return max(own.request.n_positions for own in row.owner.rows)


def _needed(row: Generation) -> int:
    return max(SHORTEST, _longest(row))
