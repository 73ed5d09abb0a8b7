"""One forward: rows in, logits out; the clean and the steered run of every request go through together."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from juice.engine.batch import ForwardBatch
from juice.engine.mode import Mode
from juice.engine.slots import SlotCache
from juice.model.loading import LoadedModel


class Runner:
    """Runs batches of rows through one model and owns the KV cache.

    With full rows the model is called with every row, companions included; otherwise with the main rows alone, and companions
    enter and leave between its layers.
    """

    def __init__(self, loaded: LoadedModel, mode: Mode) -> None:
        self._mode = mode
        self.cache = SlotCache(loaded.layout.n_layers)
        self._loaded = loaded

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a batch and cache its keys and values; return the logits float32 [kept, vocabulary]."""
        loaded, n = self._loaded, len(batch.layout.sequences)
        for layer, access, span in zip(self.cache.slot_layers, batch.layout.access, batch.spans, strict=True):
            layer.access, layer.span = access, span
        input_ids, positions = batch.input_ids, batch.positions
        # In this case every layer has the same rows.
        if self._mode.full_rows and (origins := batch.layout.routing[0].origins) is not None:
            input_ids, positions = input_ids[origins], positions[origins]
        pattern = None if self._mode.own_masks else loaded.attention
        masks = pattern.masks(positions, batch.spans[0].n_keys, loaded.dtype) if pattern else None
        with ExitStack() as stack:
            stack.enter_context(loaded.turn)
            if not self._mode.full_rows:
                stack.enter_context(loaded.routing.route(batch.layout.routing, n))
            if batch.layout.steering is not None:
                stack.enter_context(loaded.steering.apply(batch.layout.steering))
            stack.enter_context(loaded.output.keep(batch.kept_rows, batch.kept_tokens, batch.input_ids.shape[1]))
            logits: torch.Tensor = loaded.model(
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=masks,
                past_key_values=self.cache,
                use_cache=True,
            ).logits
        return logits[:, 0].float()
