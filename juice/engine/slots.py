"""The KV cache: one slot a row and layer, allocated ahead, so that joining and leaving move a few slots at most.

Per layer, keys and values are [slots, kv_heads, capacity, d_head]. Main row i has slot centre - 1 - i and companion j slot
centre + j: both kinds grow away from the centre, and the rows of a step are one contiguous view however many there are of
each. Companions have slots only in the layers that they pass. The buffers double when more is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class _SlotLayer(CacheLayerMixin):
    """The slots of one layer, and where the current forward writes and reads."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self._centre = self._n_companions = self._capacity = 0
        self._rows = self._positions = torch.empty(0)
        self._view: slice | None = None
        self._n_keys = 0

    def resize(self, n_mains: int, n_companions: int, capacity: int) -> None:
        shift, old_slots = n_mains - self._centre, self._centre + self._n_companions
        self._centre, self._n_companions, self._capacity = n_mains, n_companions, capacity
        if self.is_initialized:
            self.keys, self.values = (self._grown(old, shift, old_slots) for old in (self.keys, self.values))

    def _grown(self, old: torch.Tensor, shift: int, old_slots: int) -> torch.Tensor:
        new = old.new_zeros(self._centre + self._n_companions, old.shape[1], self._capacity, old.shape[3])
        new[shift : shift + old_slots, :, : old.shape[2]] = old
        return new

    def place(self, first_main: int, n_mains: int, first_companion: int, n_companions: int, positions: torch.Tensor, n_keys: int) -> None:
        last = self._centre - 1 - first_main
        # Rows come in the order of their slots: the newest main row first.
        mains = torch.arange(last - n_mains + 1, last + 1)
        companions = torch.arange(self._centre + first_companion, self._centre + first_companion + n_companions)
        self._rows = torch.cat([mains, companions]).to(positions.device)[:, None]
        self._positions, self._n_keys = positions, n_keys
        is_whole = first_main == 0 and (first_companion == 0 or n_companions == 0)
        self._view = slice(self._centre - n_mains, self._centre + n_companions) if is_whole else None

    def move_main(self, source: int, destination: int) -> None:
        self._copy(self._centre - 1 - source, self._centre - 1 - destination)

    def move_companion(self, source: int, destination: int) -> None:
        self._copy(self._centre + source, self._centre + destination)

    def _copy(self, source: int, destination: int) -> None:
        if self.is_initialized:
            self.keys[destination] = self.keys[source]
            self.values[destination] = self.values[source]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        for name, states in (("keys", key_states), ("values", value_states)):
            slots = states.new_zeros(self._centre + self._n_companions, states.shape[1], self._capacity, states.shape[3])
            setattr(self, name, slots)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [rows, kv_heads, tokens, d_head] at the rows' positions; return all their keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys[self._rows, :, self._positions] = key_states.transpose(1, 2)
        self.values[self._rows, :, self._positions] = value_states.transpose(1, 2)
        rows = self._rows[:, 0] if self._view is None else self._view
        return self.keys[rows, :, : self._n_keys], self.values[rows, :, : self._n_keys]

    def get_seq_length(self) -> int:
        return self._n_keys - self._positions.shape[-1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        return self._n_keys, 0

    def get_max_length(self) -> int:
        return self._capacity


class SlotCache(Cache):
    """The slots of every layer, as a cache that unmodified models take."""

    def __init__(self, n_layers: int) -> None:
        self._slots = [_SlotLayer() for _ in range(n_layers)]
        self._n_mains = self._capacity = 0
        self._n_companions = [0] * n_layers
        super().__init__(layers=list(self._slots))

    @torch.inference_mode()
    def reserve(self, n_mains: int, n_companions: Sequence[int], length: int) -> None:
        """Make room for so many main rows, companions of each layer, and positions."""
        room = [max(had, _power_of_two(n) if n else 0) for had, n in zip(self._n_companions, n_companions, strict=True)]
        if n_mains <= self._n_mains and room == self._n_companions and length <= self._capacity:
            return
        self._n_mains = max(self._n_mains, _power_of_two(n_mains))
        self._capacity = max(self._capacity, _power_of_two(length))
        self._n_companions = room
        for layer, n in zip(self._slots, room, strict=True):
            layer.resize(self._n_mains, n, self._capacity)

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero every slot."""
        for layer in self._slots:
            layer.reset()

    def place(
        self, layer: int, first_main: int, n_mains: int, first_companion: int, n_companions: int, positions: torch.Tensor, n_keys: int
    ) -> None:
        """Set where a layer of the next forward writes; positions: int64 [rows of the layer, tokens]."""
        self._slots[layer].place(first_main, n_mains, first_companion, n_companions, positions, n_keys)

    @torch.inference_mode()
    def move_main(self, source: int, destination: int) -> None:
        """Copy a main row's slot onto another's, in every layer."""
        for layer in self._slots:
            layer.move_main(source, destination)

    @torch.inference_mode()
    def move_companion(self, layer: int, source: int, destination: int) -> None:
        """Copy a companion's slot onto another's, in one layer."""
        self._slots[layer].move_companion(source, destination)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
