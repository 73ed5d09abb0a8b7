"""The KV cache: one slot a row and layer, allocated ahead; joining and leaving move few slots.

In each layer keys and values are [slots, kv_heads, capacity + 1, d_head]. Main row i has the slot
centre - 1 - i and companion j the slot centre + j: both kinds grow away from the centre, so the
rows of a decode step are one contiguous view, however many there are of each. Companions have slots
only in their window. Padding is written to the last position of a slot, which nothing reads.

The buffers grow by doubling while memory allows, and change shape with the requests: fewer and
longer slots, or more and shorter ones. Near the end of the memory they grow by as much as there is,
so that not every row that joins moves all the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import Cache

from juice.batching.room import Room
from juice.batching.slot_layer import Access, SlotLayer


class SlotsBrokenError(RuntimeError):
    """Moving slots failed half-way, so their contents are no longer known."""


class SlotCache(Cache):
    """The slots of every layer, as a cache that unmodified models accept.

    Args:
        n_layers: The number of layers.
        like: A cache of the same model, whose shapes are known from a forward.
    """

    def __init__(self, n_layers: int, like: SlotCache | None = None) -> None:
        known = [None] * n_layers if like is None else like.slot_layers
        self.slot_layers: list[SlotLayer] = [SlotLayer(layer) for layer in known]
        self._room: Room | None = None
        super().__init__(layers=list(self.slot_layers))

    def n_bytes(self, room: Room) -> int:
        """Return the bytes that a room takes; 0 before the first forward."""
        slots = (room.n_mains + n for n in room.n_companions)
        layers = zip(slots, self.slot_layers, strict=True)
        return (room.n_positions + 1) * sum(n * layer.bytes_per_position for n, layer in layers)

    @property
    def n_positions(self) -> int:
        """The positions of every slot, without the one for padding."""
        return self._room.n_positions if self._room else 0

    @property
    def n_allocated_bytes(self) -> int:
        """The bytes that the slots take now."""
        return self.n_bytes(self._room) if self._room else 0

    @torch.inference_mode()
    def reserve(self, needed: Room, max_bytes: int | None = None) -> None:
        """Make room; what is cached stays.

        Args:
            needed: The least that there must be.
            max_bytes: The most that the slots may take; None for no bound.

        Raises:
            SlotsBrokenError: The slots of some layers have changed, those of others have not.
            Exception: Whatever a failed allocation raises; it changes nothing.
        """

        def fits(room: Room) -> bool:
            return max_bytes is None or self.n_bytes(room) <= max_bytes

        had = self._room
        if had is not None and had.covers(needed) and fits(had):
            return None
        larger = (needed.with_growth(had), needed.with_growth(None), needed.with_more_rows(fits))
        for room in filter(fits, larger):
            try:
                return self.resize(room)
            except SlotsBrokenError:
                raise
            except Exception:  # noqa: S112 -- there is less memory than budgeted: try with less
                continue
        self.resize(needed)
        return None

    def resize(self, room: Room) -> None:
        """Change the shape.

        Raises SlotsBrokenError, or whatever a failed allocation raises; that changes nothing.
        """
        had = self._room
        done: list[int] = []
        try:
            for i, layer in enumerate(self.slot_layers):
                layer.resize(room.n_mains, room.n_companions[i], room.n_positions)
                done.append(i)
        except BaseException:
            if had is not None:
                self._roll_back(done, had)
            raise
        self._room = room

    def free(self) -> None:
        """Give the memory back; nothing may be cached."""
        for layer in self.slot_layers:
            layer.free()
        self._room = None

    def _roll_back(self, done: list[int], had: Room) -> None:
        try:
            for i in done:
                self.slot_layers[i].resize(had.n_mains, had.n_companions[i], had.n_positions)
        except Exception as error:
            raise SlotsBrokenError(
                f"the slots of some layers have changed shape, others have not: {error!r}"
            ) from error

    def access(
        self, layer: int, mains: Sequence[int], companions: Sequence[int], device: torch.device
    ) -> Access:
        """Return the slots of some rows, main rows first, in their order.

        Args:
            layer: The layer.
            mains: The places of the main rows.
            companions: The places of the companions.
            device: Where the index tensor goes.
        """
        own = self.slot_layers[layer]
        slots = [
            *(own.slot(p, is_main=True) for p in mains),
            *(own.slot(p, is_main=False) for p in companions),
        ]
        is_run = slots == list(range(slots[0], slots[0] + len(slots)))
        return Access(
            torch.tensor(slots, device=device)[:, None],
            slice(slots[0], slots[-1] + 1) if is_run else None,
        )

    @torch.inference_mode()
    def copy(
        self, layers: Sequence[int], source: int, destination: int, n: int, *, is_main: bool
    ) -> None:
        """Copy the first positions of one place over another's, in some layers.

        Args:
            layers: The layers.
            source: The place to copy from.
            destination: The place to copy to.
            n: How many positions to copy.
            is_main: Whether the places are those of main rows, not of companions.

        Raises:
            SlotsBrokenError: Copying failed half-way.
        """
        with _whole_or_broken():
            for layer in (self.slot_layers[i] for i in layers):
                layer.copy(
                    layer.slot(source, is_main=is_main), layer.slot(destination, is_main=is_main), n
                )

    @torch.inference_mode()
    def swap(self, layers: Sequence[int], a: int, b: int, n: int, *, is_main: bool) -> None:
        """Swap the first positions of two places, in some layers.

        Args:
            layers: The layers.
            a: One place.
            b: The other.
            n: How many positions to swap.
            is_main: Whether the places are those of main rows, not of companions.

        Raises:
            SlotsBrokenError: Swapping failed half-way.
        """
        with _whole_or_broken():
            for layer in (self.slot_layers[i] for i in layers):
                layer.swap(layer.slot(a, is_main=is_main), layer.slot(b, is_main=is_main), n)

    @torch.inference_mode()
    def clear(self, layers: Sequence[int], place: int, *, is_main: bool) -> None:
        """Zero the slot of a place.

        Masked values are multiplied by zero, so any that are not finite would reach the next owner.
        """
        for layer in (self.slot_layers[i] for i in layers):
            layer.clear(layer.slot(place, is_main=is_main))


@contextmanager
def _whole_or_broken() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise SlotsBrokenError(f"a slot was moved half-way: {error!r}") from error
