"""One forward: rows in, next-token logits out; the clean and the steered run of every request go through together."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from juice.engine.rows import ForwardBatch
from juice.engine.slots import SlotCache
from juice.model.loading import LoadedModel


class Runner:
    """Runs batches of rows through one model and owns the KV cache."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.cache = SlotCache(loaded.layout.n_layers)
        self._loaded = loaded

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a batch and cache its keys and values; return the logits float32 [main rows, vocabulary]."""
        loaded = self._loaded
        span, n = batch.span, len(batch.span.mains)
        self.cache.reserve(span.first + n, [start + len(own) for start, own in span.companions], batch.n_keys)
        for layer, (start, own) in enumerate(span.companions):
            self.cache.place(layer, span.first, n, start, len(own), batch.layer_positions[layer], batch.n_keys)
        with ExitStack() as stack:
            stack.enter_context(loaded.routing.route(batch.routing, n))
            if batch.steering is not None:
                stack.enter_context(loaded.steering.apply(batch.steering))
            rows = torch.arange(n, device=batch.input_ids.device)
            stack.enter_context(loaded.output.keep(rows, batch.last_tokens, batch.input_ids.shape[1]))
            logits: torch.Tensor = loaded.model(
                input_ids=batch.input_ids,
                position_ids=batch.positions,
                attention_mask=loaded.attention.masks(batch.positions, batch.n_keys, loaded.dtype),
                past_key_values=self.cache,
                use_cache=True,
            ).logits
        return logits[:, 0].float()
