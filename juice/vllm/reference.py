"""The definition inside vLLM's workers: two runs of the same modules, without cache or batch.

Every rank runs its part of the layers; attention is written out, over all tokens at once, and heads
are counted over all ranks. What the served path gives is compared with it at every start
(`juice.vllm.check`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.forward_context import set_forward_context

from juice.vllm.arguments import Coefficients


def two_runs(
    model: Any, vllm_config: VllmConfig, tokens: Sequence[int], coefficients: Coefficients | None
) -> torch.Tensor | None:
    """Return the logits after every token, float32 [tokens, vocabulary].

    None on ranks that do not compute logits.

    Args:
        model: One of `juice.vllm.model`'s.
        vllm_config: vLLM's configuration.
        tokens: The tokens of the text.
        coefficients: What the second run adds; None for one run, unsteered.
    """
    device = model.table.coefficients.device
    ids = torch.tensor(tokens, device=device)
    positions = torch.arange(len(ids), device=device)

    def run() -> torch.Tensor:
        with set_forward_context(None, vllm_config, num_tokens=len(ids)):
            return model(ids, positions)

    with torch.inference_mode(), _dense(model):
        clean: dict[int, torch.Tensor] = {}
        with _at_projections(model, clean.__setitem__):
            hidden = run()
        if coefficients is not None:
            with _at_projections(model, _adding(model, coefficients, clean)):
                hidden = run()
        logits = model.compute_logits(hidden)
    return None if logits is None else logits.float()


def dense_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attend to every earlier token, [1, heads, tokens, d_head] to [tokens, heads * d_head]."""
    arguments = module.attention_arguments
    n, groups = query.shape[2], query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(groups, 1) for x in (key, value))
    scores = query.float() @ key.transpose(-1, -2) * arguments["scale"]
    if cap := arguments.get("logits_soft_cap"):
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(n, device=query.device)[:, None] - torch.arange(n, device=query.device)
    hidden = distance < 0
    if window := module.attn.sliding_window:
        hidden |= distance >= window
    scores = scores.masked_fill(hidden, float("-inf"))
    if (sinks := arguments.get("sinks")) is not None:
        sink = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value)[0].transpose(0, 1).flatten(1).to(query.dtype)


@contextmanager
def _dense(model: Any) -> Iterator[None]:
    """Run the model's modules uncompiled, without companions, with attention written out."""
    companions = model.companions
    compiled = [
        module for module in model.modules() if getattr(module, "do_not_compile", None) is False
    ]
    for module in compiled:
        module.do_not_compile = True
    was_running, companions.running, companions.dense = companions.running, False, dense_attention
    try:
        yield
    finally:
        companions.running, companions.dense = was_running, None
        for module in compiled:
            module.do_not_compile = False


@contextmanager
def _at_projections(model: Any, act: Any) -> Iterator[None]:
    """Call act(layer, z) before each output projection of the window; what it returns is z."""

    def hook(layer: int) -> Any:
        def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            changed = act(layer, args[0])
            return None if changed is None else (changed, *args[1:])

        return before

    handles = [
        projection.register_forward_pre_hook(hook(layer))
        for layer, projection in model.companions.projections.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _adding(model: Any, coefficients: Coefficients, clean: dict[int, torch.Tensor]) -> Any:
    n_ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()

    def all_heads(layer: int, z: torch.Tensor) -> torch.Tensor:
        """Return z of every rank, float32 [..., heads, width]."""
        width = model.companions.projections[layer].input_size
        whole = z if z.shape[-1] == width else tensor_model_parallel_all_gather(z)
        return whole.float().unflatten(-1, (model.table.n_heads, -1))

    def add(layer: int, z: torch.Tensor) -> torch.Tensor:
        before = all_heads(layer, z)
        source = before if coefficients.own else all_heads(layer, clean[layer])
        steered, first = before.clone(), coefficients.first_position
        for at, head, value in coefficients.heads:
            if at == layer:
                steered[..., first:, head, :] += value * source[..., first:, head, :]
        whole = steered.flatten(-2).to(z.dtype)
        return whole if whole.shape == z.shape else whole.chunk(n_ranks, -1)[rank].contiguous()

    return add
