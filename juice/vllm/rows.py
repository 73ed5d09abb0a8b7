"""Fills the table: vLLM's V1 model runner tells logits processors what happens to its rows.

This one changes no logits.
"""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from juice.errors import UnsupportedModelError
from juice.vllm.arguments import Coefficients, check_origin
from juice.vllm.table import Table


class RowWriter(LogitsProcessor):
    """Writes the table of this process' model before each step."""

    table: Table

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        if not vllm_config.model_config.architecture.startswith("Transformers"):
            raise UnsupportedModelError(
                "vLLM's own class of the model is not steered: start vLLM with --model-impl "
                "transformers"
            )

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request that steers past JuICE."""
        check_origin(sampling_params.extra_args)

    def is_argmax_invariant(self) -> bool:
        """Whether greedy tokens stay the same: the logits do."""
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits unchanged."""
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Write what was removed, added and moved since the last step, in this order."""
        if batch_update is None:
            return
        table = RowWriter.table
        for row in batch_update.removed:
            table.write(row, None)
        for row, params, _prompt, _output in batch_update.added:
            table.write(row, Coefficients.read(params.extra_args))
        for source, destination, how in batch_update.moved:
            if how is MoveDirectionality.SWAP:
                table.swap(source, destination)
            else:
                table.move(source, destination)
