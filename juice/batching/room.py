"""How much room a shelf has: slots for rows of each kind, and their length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """How many slots to have, for main rows and for the companions of each layer, and how long."""

    n_mains: int
    n_companions: tuple[int, ...]
    n_positions: int

    def covers(self, other: Room) -> bool:
        """Return whether another room fits into this one."""
        companions = all(a >= b for a, b in zip(self.n_companions, other.n_companions, strict=True))
        return (
            self.n_mains >= other.n_mains and companions and self.n_positions >= other.n_positions
        )

    def with_growth(self, had: Room | None) -> Room:
        """Return this room rounded up to powers of two, and no smaller than `had`."""
        old = had or Room(0, (0,) * len(self.n_companions), 0)
        return Room(
            max(old.n_mains, _power_of_two(self.n_mains)),
            tuple(
                max(a, _power_of_two(b))
                for a, b in zip(old.n_companions, self.n_companions, strict=True)
            ),
            max(old.n_positions, _power_of_two(self.n_positions)),
        )

    def with_more_rows(self, fits: Callable[[Room], bool]) -> Room:
        """Return this room with as many more rows as fit, at most twice as many.

        Near the end of the memory, so that the next rows to join do not each change the shape.
        """
        return max(
            (room for n in range(self.n_mains + 1) if fits(room := self._with_rows(n))),
            key=lambda room: room.n_mains,
            default=self,
        )

    def _with_rows(self, n: int) -> Room:
        companions = tuple(own + min(n, own) for own in self.n_companions)
        return Room(self.n_mains + n, companions, self.n_positions)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length() if n else 0
