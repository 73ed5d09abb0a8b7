"""One forward: rows in, logits out; the clean and the steered run of every request go through together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from juice.batching.batch import ForwardBatch
from juice.batching.slots import SlotCache
from juice.model.loaded import LoadedModel
from juice.model.masks import narrow_sliding_windows
from juice.model.ranks import everywhere
from juice.model.two_runs import two_runs


@dataclass(frozen=True, kw_only=True)
class Mode:
    """What a model needs of the rows of a forward, as the check at load finds out.

    Args:
        full_rows: Its layers must all see the same rows, so a dual run is two of them from the first layer to the last.
        own_masks: It masks and biases its attention by itself, so only rows with as many tokens cached share a forward.
        sliding_window: For the check: the tokens of every sliding window, instead of its own.
    """

    full_rows: bool = False
    own_masks: bool = False
    sliding_window: int | None = None


class Runner:
    """Runs batches of rows through one model and owns the KV cache.

    With full rows the model is called with every row, companions included; otherwise with the main
    rows alone, and companions enter and leave between its layers. Rank 0's runner of a sharded
    model has its peers on the other ranks do what it does.
    """

    def __init__(self, loaded: LoadedModel, mode: Mode) -> None:
        self._mode = mode
        self._pattern = None if mode.own_masks else loaded.mask_pattern
        if mode.sliding_window is not None and self._pattern is not None:
            self._pattern = self._pattern.narrowed(mode.sliding_window)
        self.peers = loaded.ranks.peers(mode=mode) if loaded.ranks else None
        self.cache = SlotCache(
            loaded.layout.n_layers, self.peers.part("cache") if self.peers else None
        )
        self._loaded = loaded

    @everywhere
    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a batch and cache its keys and values; return the logits float32 [kept, vocabulary]."""
        loaded, n = self._loaded, len(batch.input_ids)
        for layer, access, span in zip(
            self.cache.slot_layers, batch.rows.access, batch.spans, strict=True
        ):
            layer.access, layer.span = access, span
        input_ids, positions = batch.input_ids, batch.positions
        # In this case every layer has the same rows.
        if self._mode.full_rows and (origins := batch.rows.routing[0].origins) is not None:
            input_ids, positions = input_ids[origins], positions[origins]
        pattern = self._pattern
        masks = pattern.masks(positions, batch.spans[0].n_keys, loaded.dtype) if pattern else None
        with ExitStack() as stack:
            stack.enter_context(loaded.turn)
            stack.enter_context(narrow_sliding_windows(loaded.model, self._mode.sliding_window))
            if not self._mode.full_rows:
                stack.enter_context(loaded.routing.route(batch.rows.routing, n))
            if batch.rows.steering_plan is not None:
                stack.enter_context(loaded.steering_hooks.apply(batch.rows.steering_plan))
            stack.enter_context(
                loaded.logits.keep(batch.kept_rows, batch.kept_tokens, batch.input_ids.shape[1])
            )
            logits: torch.Tensor = loaded.run(
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=masks,
                past_key_values=self.cache,
                use_cache=True,
            ).logits
        return logits[:, 0].float()

    @everywhere
    @torch.inference_mode()
    def two_runs(
        self, ids: torch.Tensor, coefficients: Mapping[int, torch.Tensor], n_kept: int
    ) -> torch.Tensor:
        """Return the logits of the definition, see `juice.model.two_runs`: nothing of this runner's has a part in it but its windows."""
        loaded = self._loaded
        with loaded.turn, narrow_sliding_windows(loaded.model, self._mode.sliding_window):
            return two_runs(loaded, ids.to(loaded.device), coefficients, n_kept)

    def close(self) -> None:
        """Let the peers go."""
        if self.peers is not None:
            self.peers.drop()
