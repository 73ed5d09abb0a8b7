"""Seeded requests on CPUs, which end vLLM's worker when their prompts are prefilled in parts.

A part that is not the last one samples a token that nobody wants. vLLM then takes back what the
request's generator drew by its offset, and generators on CPUs have none (vLLM 0.32). Here such a
draw is taken back by the generator's state.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_sample, _bookkeeping_sync = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync


def take_back_by_state() -> None:
    """Change the model runner of this process, which must be on a CPU."""
    GPUModelRunner._sample = _sample_and_take_back
    GPUModelRunner._bookkeeping_sync = _bookkeeping_sync_of_others


def _sample_and_take_back(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    states = {own: own.get_state() for own in _discarded(self).values()}
    try:
        return _sample(self, *args, **kwargs)
    finally:
        for own, state in states.items():
            own.set_state(state)


def _bookkeeping_sync_of_others(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    generators, discarded = self.input_batch.generators, _discarded(self)
    for row in discarded:
        del generators[row]
    try:
        return _bookkeeping_sync(self, *args, **kwargs)
    finally:
        generators |= discarded


def _discarded(runner: GPUModelRunner) -> dict[int, torch.Generator]:
    """Return the generators of the rows whose sampled token is not wanted."""
    is_discarded = runner.discard_request_mask.np
    return {row: own for row, own in runner.input_batch.generators.items() if is_discarded[row]}
