"""The keys and values of one layer in slots, one a row, as a cache layer that models accept.

Keys and values are [slots, kv_heads, capacity + 1, d_head]. Main row i has the slot
centre - 1 - i and companion j the slot centre + j; the last position takes what padding writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin


@dataclass(frozen=True, eq=False)
class Access:
    """The slots of one forward's rows in a layer.

    `slots` is int64 [rows, 1]; `view` is the same as a slice, None where they are not contiguous.
    """

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
        self._shape = (0, 0, 0)
        self.access: Access
        self.span: Span
        if like is not None and like.is_initialized:
            self.lazy_initialization(like.keys, like.values)

    @property
    def n_kv_heads(self) -> int:
        """The number of key-value heads; 0 before the first forward."""
        return self.keys.shape[1] if self.is_initialized else 0

    @property
    def bytes_per_position(self) -> int:
        """The bytes of one row's keys and values at one position; 0 before the first forward."""
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

    def free(self) -> None:
        """Give the memory back; the shapes stay known."""
        self._shape = (0, 0, 0)
        if self.is_initialized:
            self.lazy_initialization(self.keys, self.values)

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
        n_slots = n_mains + n_companions
        self.keys, self.values = (
            states.new_zeros(n_slots, states.shape[1], n_positions + 1, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [rows, kv_heads, tokens, d_head] at the rows' positions; return what is read."""
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
        return self._shape[2]
