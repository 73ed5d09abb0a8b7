"""One forward: rows in, logits out; the clean and steered runs of every request share it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from juice.batching.batch import ForwardBatch
from juice.model.loaded import LoadedModel
from juice.model.masks import narrow_sliding_windows


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How rows must go through a model, as the check at load finds out.

    Args:
        full_rows: All layers must see the same rows, so companions go through every layer.
        own_masks: The model makes its own masks: only rows with equal `n_cached` share a forward.
        sliding_window: For the check: replaces the size of every sliding window, in tokens.
    """

    full_rows: bool = False
    own_masks: bool = False
    sliding_window: int | None = None


class Runner:
    """Runs batches of rows through one model.

    With full rows the model is called with every row, companions included; otherwise with the main
    rows alone, and companions enter and leave between its layers.
    """

    def __init__(self, loaded: LoadedModel, mode: Mode) -> None:
        self._mode = mode
        self._pattern = None if mode.own_masks else loaded.mask_pattern
        if mode.sliding_window is not None and self._pattern is not None:
            self._pattern = self._pattern.narrowed(mode.sliding_window)
        self._loaded = loaded

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a batch and cache its keys and values; return logits, float32 [kept, vocabulary]."""
        loaded, n, cache = self._loaded, len(batch.input_ids), batch.rows.cache
        for layer, access, span in zip(
            cache.slot_layers, batch.rows.access, batch.spans, strict=True
        ):
            layer.access, layer.span = access, span
        input_ids, positions = batch.input_ids, batch.positions
        # With full rows every layer has the same ones.
        if self._mode.full_rows and (origins := batch.rows.routing[0].origins) is not None:
            input_ids, positions = input_ids[origins], positions[origins]
        pattern = self._pattern
        masks = None
        if pattern and not (batch.spans[0].is_fresh and pattern.is_causal_alone):
            masks = pattern.masks(positions, batch.spans[0].n_keys, loaded.dtype)
        with ExitStack() as stack:
            stack.enter_context(loaded.turn)
            stack.enter_context(narrow_sliding_windows(loaded.model, self._mode.sliding_window))
            if not self._mode.full_rows:
                stack.enter_context(loaded.routing.route(batch.rows.routing, n))
            if batch.steering_plan is not None:
                stack.enter_context(loaded.steering_hooks.apply(batch.steering_plan))
            stack.enter_context(
                loaded.logits.keep(batch.kept_rows, batch.kept_tokens, batch.input_ids.shape[1])
            )
            logits: torch.Tensor = loaded.run(
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=masks,
                past_key_values=cache,
                use_cache=True,
            ).logits
        return logits[:, 0].float()
