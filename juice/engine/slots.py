"""The KV cache: one slot a row, allocated ahead, so that joining and leaving move at most two slots.

Per layer, keys and values are [n_slots, kv_heads, capacity, d_head]; a forward over the rows first ... last writes each
row's new tokens at its own positions and attends to a view of these slots. The buffers double when more is needed.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class _Placement:
    """Where the current forward reads and writes: rows first ... first + n - 1, positions [n, tokens], keys below n_keys."""

    first: int
    rows: torch.Tensor
    positions: torch.Tensor
    n_keys: int


class _SlotLayer(CacheLayerMixin):
    """The slots of one layer."""

    is_sliding = False

    def __init__(self, placement: _Placement) -> None:
        super().__init__()
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self._at = placement
        self._n_slots = self._capacity = 0

    def resize(self, n_slots: int, capacity: int) -> None:
        self._n_slots, self._capacity = n_slots, capacity
        if self.is_initialized:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = old.new_zeros(self._n_slots, old.shape[1], self._capacity, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def move(self, source: int, destination: int) -> None:
        if self.is_initialized:
            self.keys[destination] = self.keys[source]
            self.values[destination] = self.values[source]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        for name, states in (("keys", key_states), ("values", value_states)):
            setattr(self, name, states.new_zeros(self._n_slots, states.shape[1], self._capacity, states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [rows, kv_heads, tokens, d_head] at the rows' positions; return views of all their keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        at = self._at
        self.keys[at.rows, :, at.positions] = key_states.transpose(1, 2)
        self.values[at.rows, :, at.positions] = value_states.transpose(1, 2)
        span = slice(at.first, at.first + len(at.rows))
        return self.keys[span, :, : at.n_keys], self.values[span, :, : at.n_keys]

    def get_seq_length(self) -> int:
        return self._at.n_keys - self._at.positions.shape[1] if hasattr(self._at, "positions") else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        return self._at.n_keys, 0

    def get_max_length(self) -> int:
        return self._capacity


class SlotCache(Cache):
    """The slots of every layer, as a cache that unmodified models take."""

    def __init__(self, n_layers: int) -> None:
        self._placement = _Placement()
        self._slots = [_SlotLayer(self._placement) for _ in range(n_layers)]
        self.n_slots = self.capacity = 0
        super().__init__(layers=list(self._slots))

    @torch.inference_mode()
    def reserve(self, n_slots: int, length: int) -> None:
        """Make room for so many rows of so many positions."""
        if n_slots <= self.n_slots and length <= self.capacity:
            return
        self.n_slots = max(self.n_slots, _power_of_two(n_slots))
        self.capacity = max(self.capacity, _power_of_two(length))
        for layer in self._slots:
            layer.resize(self.n_slots, self.capacity)

    def place(self, first: int, positions: torch.Tensor, n_keys: int) -> None:
        """Set where the next forward writes; positions: int64 [rows, tokens]."""
        at = self._placement
        at.first, at.positions, at.n_keys = first, positions, n_keys
        at.rows = torch.arange(first, first + len(positions), device=positions.device)[:, None]

    @torch.inference_mode()
    def move(self, source: int, destination: int) -> None:
        """Copy a row's slot onto another's, in every layer."""
        for layer in self._slots:
            layer.move(source, destination)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
