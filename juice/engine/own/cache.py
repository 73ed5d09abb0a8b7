"""The KV cache: the keys and values of each layer in slots, one a row, allocated ahead.

In each layer keys and values are [slots, kv_heads, n_positions + 1, d_head]. Main row i has the
slot n_mains - 1 - i and companion j the slot n_mains + j: both kinds grow away from the centre, so
the rows of a decode step are one contiguous view, however many there are of each, and few slots
move when a row joins or leaves. Companions have slots only in their window. Padding is written to
the last position of a slot, which nothing reads.

The buffers grow by doubling, and near the end of the memory by as much as there is, so that not
every row that joins moves all the others; they change shape with the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


@dataclass(frozen=True)
class ShelfSize:
    """The size of a shelf: slots for main rows and for companions by layer, and their length."""

    n_mains: int
    n_companions: tuple[int, ...]
    n_positions: int

    def covers(self, other: ShelfSize) -> bool:
        """Return whether another size fits into this one."""
        had = (self.n_mains, self.n_positions, *self.n_companions)
        needed = (other.n_mains, other.n_positions, *other.n_companions)
        return all(a >= b for a, b in zip(had, needed, strict=True))

    def with_growth(self, had: ShelfSize | None) -> ShelfSize:
        """Return this size rounded up to powers of two, and no smaller than `had`."""
        old = had or ShelfSize(0, (0,) * len(self.n_companions), 0)
        companions = zip(old.n_companions, self.n_companions, strict=True)
        return ShelfSize(
            max(old.n_mains, _power_of_two(self.n_mains)),
            tuple(max(a, _power_of_two(b)) for a, b in companions),
            max(old.n_positions, _power_of_two(self.n_positions)),
        )

    def with_more_rows(self, fits: Callable[[ShelfSize], bool]) -> ShelfSize:
        """Return this size with as many more rows as fit, at most twice as many."""
        return max(
            (size for n in range(self.n_mains + 1) if fits(size := self._with_rows(n))),
            key=lambda size: size.n_mains,
            default=self,
        )

    def _with_rows(self, n: int) -> ShelfSize:
        companions = tuple(n_slots + min(n, n_slots) for n_slots in self.n_companions)
        return ShelfSize(self.n_mains + n, companions, self.n_positions)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length() if n else 0


@dataclass(frozen=True, eq=False)
class Access:
    """The slots of a layer's rows, int64 [rows, 1], and as a slice, where they are contiguous."""

    slots: torch.Tensor
    view: slice | None


@dataclass(frozen=True, eq=False)
class Span:
    """The positions of one forward, shared by layers with the same rows.

    `writes`, int64 [rows, tokens], holds the positions in the slots to write; the first `n_keys`
    positions are read. With `is_fresh` no row has anything cached yet: only the new keys are read.
    """

    writes: torch.Tensor
    n_keys: int
    is_fresh: bool


class SlotLayer(CacheLayerMixin):
    """The slots of one layer."""

    is_sliding = False

    def __init__(self, like: SlotLayer | None = None) -> None:
        super().__init__()
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self.shape = (0, 0, 0)
        self.access: Access
        self.span: Span
        if like is not None and like.is_initialized:
            self.lazy_initialization(like.keys, like.values)

    @property
    def n_kv_heads(self) -> int:
        return self.keys.shape[1] if self.is_initialized else 0

    @property
    def bytes_per_position(self) -> int:
        """The bytes of one row's keys and values at one position; 0 before the first forward."""
        if not self.is_initialized:
            return 0
        return sum(kv.shape[1] * kv.shape[3] * kv.element_size() for kv in (self.keys, self.values))

    def resize(self, n_mains: int, n_companions: int, n_positions: int) -> None:
        """Change the numbers of slots and their positions; cached keys and values stay."""
        old, self.shape = self.shape, (n_mains, n_companions, n_positions)
        if not self.is_initialized or old == self.shape:
            return
        try:
            self.keys, self.values = self.reshaped(self.keys, old), self.reshaped(self.values, old)
        except BaseException:
            self.shape = old
            raise

    def reshaped(self, source: torch.Tensor, old: tuple[int, int, int]) -> torch.Tensor:
        """Return keys or values of the shape `old` in the present shape.

        A shape is the numbers of main slots, of companions' slots and of positions.
        """
        n_mains, n_companions, n_positions = self.shape
        new = source.new_zeros(
            n_mains + n_companions, source.shape[1], n_positions + 1, source.shape[3]
        )
        mains, companions = min(n_mains, old[0]), min(n_companions, old[1])
        length = min(n_positions, old[2])
        new[n_mains - mains : n_mains + companions, :, :length] = source[
            old[0] - mains : old[0] + companions, :, :length
        ]
        return new

    def free(self) -> None:
        """Give the memory back; the shapes stay known."""
        self.shape = (0, 0, 0)
        if self.is_initialized:
            self.lazy_initialization(self.keys, self.values)

    def slot(self, row: int, *, is_main: bool) -> int:
        return self.shape[0] - 1 - row if is_main else self.shape[0] + row

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
        """Allocate slots for keys and values like these, [any, kv_heads, any, d_head]."""
        n_mains, n_companions, n_positions = self.shape
        n_slots = n_mains + n_companions
        self.keys, self.values = (
            states.new_zeros(n_slots, states.shape[1], n_positions + 1, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values at the rows' positions, and return those that attention reads.

        They come as [rows, kv_heads, tokens, d_head] and go as [rows, kv_heads, n_keys, d_head].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        span = self.span
        # Layers may be on different devices.
        slots, writes = self.access.slots.to(self.keys.device), span.writes.to(self.keys.device)
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
        return self.shape[2]


class SlotsBrokenError(RuntimeError):
    """Moving or resizing slots failed half-way, so their contents are no longer known."""


class SlotCache(Cache):
    """The slots of every layer, as a cache that unmodified models accept.

    `like` is a cache of the same model, whose shapes are known from a forward.
    """

    def __init__(self, n_layers: int, like: SlotCache | None = None) -> None:
        known = [None] * n_layers if like is None else like.slot_layers
        self.slot_layers: list[SlotLayer] = [SlotLayer(layer) for layer in known]
        self.size: ShelfSize | None = None  # None while nothing is allocated
        super().__init__(layers=list(self.slot_layers))

    def n_bytes(self, size: ShelfSize) -> int:
        """Return the bytes that slots of a size take; 0 before the first forward."""
        slots = (size.n_mains + n for n in size.n_companions)
        layers = zip(slots, self.slot_layers, strict=True)
        return (size.n_positions + 1) * sum(n * layer.bytes_per_position for n, layer in layers)

    @property
    def n_positions(self) -> int:
        """The positions of every slot, without the one for padding."""
        return self.size.n_positions if self.size else 0

    @property
    def n_allocated_bytes(self) -> int:
        """The bytes that the slots take now."""
        return self.n_bytes(self.size) if self.size else 0

    @torch.inference_mode()
    def reserve(self, needed: ShelfSize, max_bytes: int | None = None) -> None:
        """Have slots of at least this size, in at most `max_bytes`; what is cached stays.

        Raises SlotsBrokenError, or whatever a failed allocation raises; that changes nothing.
        """

        def fits(size: ShelfSize) -> bool:
            return max_bytes is None or self.n_bytes(size) <= max_bytes

        had = self.size
        if had is not None and had.covers(needed) and fits(had):
            return
        larger = (needed.with_growth(had), needed.with_growth(None), needed.with_more_rows(fits))
        for size in filter(fits, larger):
            try:
                self.resize(size)
                return
            except SlotsBrokenError:
                raise
            except Exception:  # noqa: S112 -- there is less memory than budgeted: try with less
                continue
        self.resize(needed)

    def resize(self, size: ShelfSize) -> None:
        """Change the shape; raises as `reserve` does."""
        had = self.size
        done: list[int] = []
        try:
            for i, layer in enumerate(self.slot_layers):
                layer.resize(size.n_mains, size.n_companions[i], size.n_positions)
                done.append(i)
        except BaseException:
            if had is not None:
                self._roll_back(done, had)
            raise
        self.size = size

    def free(self) -> None:
        """Give the memory back; nothing may be cached."""
        for layer in self.slot_layers:
            layer.free()
        self.size = None

    def _roll_back(self, done: list[int], had: ShelfSize) -> None:
        try:
            for i in reversed(done):
                self.slot_layers[i].resize(had.n_mains, had.n_companions[i], had.n_positions)
        except Exception as error:
            raise SlotsBrokenError(
                f"the slots of some layers have changed shape, others have not: {error!r}"
            ) from error

    def access(
        self, layer: int, mains: Sequence[int], companions: Sequence[int], device: torch.device
    ) -> Access:
        """Return the slots of some rows of a layer, main rows first, in their order."""
        slot_layer = self.slot_layers[layer]
        slots = [
            *(slot_layer.slot(row, is_main=True) for row in mains),
            *(slot_layer.slot(row, is_main=False) for row in companions),
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
        """Copy n positions of one row over another's: main rows, or companions.

        Raises SlotsBrokenError where that failed half-way.
        """
        with _whole_or_broken():
            for layer in (self.slot_layers[i] for i in layers):
                layer.copy(
                    layer.slot(source, is_main=is_main), layer.slot(destination, is_main=is_main), n
                )

    @torch.inference_mode()
    def swap(self, layers: Sequence[int], a: int, b: int, n: int, *, is_main: bool) -> None:
        """Swap n positions of two rows: main rows, or companions.

        Raises SlotsBrokenError where that failed half-way.
        """
        with _whole_or_broken():
            for layer in (self.slot_layers[i] for i in layers):
                layer.swap(layer.slot(a, is_main=is_main), layer.slot(b, is_main=is_main), n)

    @torch.inference_mode()
    def clear(self, layers: Sequence[int], row: int, *, is_main: bool) -> None:
        """Zero the slot of a row.

        Masked values are multiplied by zero, so any that are not finite would reach the next owner.
        """
        for layer in (self.slot_layers[i] for i in layers):
            layer.clear(layer.slot(row, is_main=is_main))


@contextmanager
def _whole_or_broken() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise SlotsBrokenError(f"a slot was moved half-way: {error!r}") from error
