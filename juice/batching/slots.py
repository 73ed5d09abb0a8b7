"""The KV cache: one slot a row and layer, allocated ahead, so that joining and leaving move a few slots at most.

Per layer, keys and values are [slots, kv_heads, capacity + 1, d_head]. Main row i has slot centre -
1 - i and companion j slot centre + j: both kinds grow away from the centre, and the rows of a
decode step are one contiguous view however many there are of each. Companions have slots only in
the layers that they pass. The last position of a slot takes what padding writes; nothing reads it.

The buffers grow by doubling while memory allows, and take another shape when the requests do: fewer
slots that are longer, or the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from juice.model.ranks import Peers, everywhere


class SlotsBrokenError(RuntimeError):
    """Moving slots failed half-way: what they hold is not known any more."""


@dataclass(frozen=True)
class Room:
    """Slots for so many main rows, companions of each layer, and positions."""

    n_mains: int
    n_companions: tuple[int, ...]
    n_positions: int

    def covers(self, other: Room) -> bool:
        """Tell whether another room fits into this one."""
        companions = all(a >= b for a, b in zip(self.n_companions, other.n_companions, strict=True))
        return (
            self.n_mains >= other.n_mains and companions and self.n_positions >= other.n_positions
        )

    def with_growth(self, had: Room | None) -> Room:
        """Return this room rounded up to powers of two, and at least what there was."""
        old = had or Room(0, (0,) * len(self.n_companions), 0)
        return Room(
            max(old.n_mains, _power_of_two(self.n_mains)),
            tuple(
                max(a, _power_of_two(b))
                for a, b in zip(old.n_companions, self.n_companions, strict=True)
            ),
            max(old.n_positions, _power_of_two(self.n_positions)),
        )


@dataclass(frozen=True, eq=False)
class Access:
    """Where one forward writes and reads: slots int64 [rows, 1], the same as a slice where they are contiguous."""

    slots: torch.Tensor
    view: slice | None


@dataclass(frozen=True, eq=False)
class Span:
    """The positions of one forward, the same in layers with the same rows.

    `writes` int64 [rows, tokens] are positions of the slots; the first `n_keys` are read. With
    `is_fresh` no row has anything cached yet: the keys to read are the new ones.
    """

    writes: torch.Tensor
    n_keys: int
    is_fresh: bool


class _SlotLayer(CacheLayerMixin):
    """The slots of one layer."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self._shape = (0, 0, 0)
        self.access: Access
        self.span: Span

    @property
    def n_kv_heads(self) -> int:
        """Heads of keys and values; 0 before the first forward."""
        return self.keys.shape[1] if self.is_initialized else 0

    @property
    def bytes_per_position(self) -> int:
        """Bytes of one row's keys and values at one position; 0 before the first forward."""
        if not self.is_initialized:
            return 0
        return sum(kv.shape[1] * kv.shape[3] * kv.element_size() for kv in (self.keys, self.values))

    def resize(self, n_mains: int, n_companions: int, n_positions: int) -> None:
        old, self._shape = self._shape, (n_mains, n_companions, n_positions)
        if not self.is_initialized or old == self._shape:
            return
        try:
            self.keys, self.values = self._copied(self.keys, old), self._copied(self.values, old)
        except BaseException:
            self._shape = old
            raise

    def _copied(self, source: torch.Tensor, old: tuple[int, int, int]) -> torch.Tensor:
        n_mains, n_companions, n_positions = self._shape
        new = source.new_zeros(
            n_mains + n_companions, source.shape[1], n_positions + 1, source.shape[3]
        )
        mains, companions = min(n_mains, old[0]), min(n_companions, old[1])
        length = min(n_positions, old[2])
        new[n_mains - mains : n_mains + companions, :, :length] = source[
            old[0] - mains : old[0] + companions, :, :length
        ]
        return new

    def slot(self, place: int, *, is_main: bool) -> int:
        return self._shape[0] - 1 - place if is_main else self._shape[0] + place

    def copy(self, source: int, destination: int, n: int) -> None:
        if self.is_initialized:
            for kv in (self.keys, self.values):
                kv[destination, :, :n] = kv[source, :, :n]

    def swap(self, a: int, b: int, n: int) -> None:
        if self.is_initialized:
            for kv in (self.keys, self.values):
                kept = kv[a, :, :n].clone()
                kv[a, :, :n] = kv[b, :, :n]
                kv[b, :, :n] = kept

    def clear(self, slot: int) -> None:
        if self.is_initialized:
            self.keys[slot] = 0
            self.values[slot] = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        n_mains, n_companions, n_positions = self._shape
        for name, states in (("keys", key_states), ("values", value_states)):
            setattr(
                self,
                name,
                states.new_zeros(
                    n_mains + n_companions, states.shape[1], n_positions + 1, states.shape[3]
                ),
            )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [rows, kv_heads, tokens, d_head] at the rows' positions; return all their keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        span = self.span
        slots, writes = (
            self.access.slots.to(self.keys.device),
            span.writes.to(self.keys.device),
        )  # layers may lie on several devices
        self.keys[slots, :, writes] = key_states.transpose(1, 2)
        self.values[slots, :, writes] = value_states.transpose(1, 2)
        if span.is_fresh:
            return key_states, value_states
        rows = slots[:, 0] if self.access.view is None else self.access.view
        return self.keys[rows, :, : span.n_keys], self.values[rows, :, : span.n_keys]

    def get_seq_length(self) -> int:
        return self.span.n_keys - self.span.writes.shape[-1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        return self.span.n_keys, 0

    def get_max_length(self) -> int:
        return self._shape[2]


class SlotCache(Cache):
    """The slots of every layer, as a cache that unmodified models take; within `max_bytes`, where that is set.

    With `peers`, the caches of the other ranks of a sharded model keep the same slots, for their
    own heads.
    """

    def __init__(self, n_layers: int, peers: Peers | None = None) -> None:
        self.peers = peers
        self.slot_layers = [_SlotLayer() for _ in range(n_layers)]
        self.max_bytes: int | None = None
        self._room: Room | None = None
        super().__init__(layers=list(self.slot_layers))

    def n_bytes(self, room: Room) -> int:
        """Return the bytes that a room takes; 0 before the first forward has shown the layers' shapes."""
        slots = (room.n_mains + n for n in room.n_companions)
        layers = zip(slots, self.slot_layers, strict=True)
        return (room.n_positions + 1) * sum(n * layer.bytes_per_position for n, layer in layers)

    @property
    def n_positions(self) -> int:
        """The positions of every slot, the one for padding not counted."""
        return self._room.n_positions if self._room else 0

    def fits(self, room: Room) -> bool:
        """Tell whether a room is within the memory that may be used."""
        return self.max_bytes is None or self.n_bytes(room) <= self.max_bytes

    @torch.inference_mode()
    def reserve(self, needed: Room) -> None:
        """Make room; what is cached stays. Raises what an allocation raises, nothing having changed, or SlotsBrokenError."""
        had = self._room
        if had is not None and had.covers(needed) and self.fits(had):
            return None
        rooms = [
            room for room in (needed.with_growth(had), needed.with_growth(None)) if self.fits(room)
        ]
        for room in rooms:
            try:
                return self._resize(room)
            except SlotsBrokenError:
                raise
            except Exception:  # noqa: S112 -- less memory than the budget says: try with less
                continue
        self._resize(needed)
        return None

    def _resize(self, room: Room) -> None:
        """Take another shape on every rank, or on none."""
        if self.peers is None:
            return self.resize(room)
        had = self._room
        failures = self.peers.attempt("resize", partial(self.resize, room), room)
        failed = [failure for failure in failures if failure is not None]
        if failed and had is not None and len(failed) < len(failures):
            self.peers.call("resize", partial(self.resize, had), had)
        if failed:
            raise failed[0]
        return None

    def resize(self, room: Room) -> None:
        """Take another shape.

        Raises what an allocation raises, nothing having changed, or SlotsBrokenError.
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

    def _roll_back(self, done: list[int], had: Room) -> None:
        try:
            for i in done:
                self.slot_layers[i].resize(had.n_mains, had.n_companions[i], had.n_positions)
        except Exception as error:
            raise SlotsBrokenError(
                f"the slots of some layers have grown, others not: {error!r}"
            ) from error

    def access(
        self, layer: int, mains: Sequence[int], companions: Sequence[int], device: torch.device
    ) -> Access:
        """Return the slots of rows in their order: main rows by their places, then companions by theirs."""
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

    @everywhere
    @torch.inference_mode()
    def copy(
        self, layers: Sequence[int], source: int, destination: int, n: int, *, is_main: bool
    ) -> None:
        """Copy the first n positions of one place onto another's, in some layers.

        Raises SlotsBrokenError.
        """
        with _whole_or_broken():
            for layer in (self.slot_layers[i] for i in layers):
                layer.copy(
                    layer.slot(source, is_main=is_main), layer.slot(destination, is_main=is_main), n
                )

    @everywhere
    @torch.inference_mode()
    def swap(self, layers: Sequence[int], a: int, b: int, n: int, *, is_main: bool) -> None:
        """Exchange the first n positions of two places, in some layers; raises SlotsBrokenError."""
        with _whole_or_broken():
            for layer in (self.slot_layers[i] for i in layers):
                layer.swap(layer.slot(a, is_main=is_main), layer.slot(b, is_main=is_main), n)

    @everywhere
    @torch.inference_mode()
    def clear(self, layers: Sequence[int], place: int, *, is_main: bool) -> None:
        """Zero the slot of a place: what is not finite would reach whoever gets it next, for masked keys meet a zero weight."""
        for layer in (self.slot_layers[i] for i in layers):
            layer.clear(layer.slot(place, is_main=is_main))


@contextmanager
def _whole_or_broken() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise SlotsBrokenError(f"a slot was moved half-way: {error!r}") from error


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length() if n else 0
