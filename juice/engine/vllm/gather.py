"""The tokens of a step that have companions, where these are not all: on CPUs.

In the window a step has n tokens and k companions, those of the requests that are steered in two
runs. Graphs with one number alone do not take that, so on GPUs every token has one. PyTorch's
compiler takes k as a size that each step may choose: the op `juice::sources` returns so many. So
does vLLM's own for Llama, exactly; for GPT-OSS it ends, since it asks whether k is 0 where it is
not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CompilationMode, VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from juice.engine.vllm.arguments import Layers

_of_step = [torch.zeros(1, dtype=torch.int64)]


def may_gather(vllm_config: VllmConfig, layers: Layers) -> bool:
    """Return whether a step may have companions of some tokens alone.

    Where it is compiled, steps without any need a twin.
    """
    mode = vllm_config.compilation_config.mode
    if mode != CompilationMode.NONE:
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
    may = mode == CompilationMode.NONE or (mode != CompilationMode.VLLM_COMPILE and layers.twin)
    has_graphs = vllm_config.device_config.device_type != "cpu" or is_breakable_cudagraph_enabled()
    return may and not has_graphs


def choose(sources: torch.Tensor) -> None:
    """Set the tokens of the next step that have companions, int64 [k], at least one."""
    _of_step[0] = sources


@torch.library.custom_op("juice::sources", mutates_args=())
def sources(hidden: torch.Tensor) -> torch.Tensor:
    """Return the tokens of the step that have companions, int64 [k]."""
    return _of_step[0].to(hidden.device, copy=True)


@sources.register_fake
def _(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


class Gathering:
    """Gives shadows the metadata of the requests with companions, in vLLM's forward context."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._config = vllm_config
        self._builders: dict[str, Any] = {}

    def narrow(self, context: Any, requests: Sequence[int]) -> None:
        """Leave some of a step's requests to the shadows, and `choose` their tokens."""
        metadata, slots = dict(context.attn_metadata), dict(context.slot_mapping or {})
        starts = next(iter(metadata.values())).query_start_loc.tolist()
        tokens = [range(starts[i], starts[i + 1]) for i in requests]
        chosen = torch.tensor([token for part in tokens for token in part])
        choose(chosen)
        if len(requests) == len(starts) - 1:
            return
        made: dict[int, Any] = {}
        for name, whole in context.attn_metadata.items():
            if ".shadow." not in name:
                continue
            if id(whole) not in made:
                made[id(whole)] = self._part(name, whole, requests, [*map(len, tokens)], chosen)
            metadata[name], slots[name] = made[id(whole)], made[id(whole)].slot_mapping
        context.attn_metadata, context.slot_mapping = metadata, slots

    def _part(
        self, name: str, whole: Any, requests: Sequence[int], n_tokens: list[int], at: torch.Tensor
    ) -> Any:
        """Return the metadata of some requests, whose tokens are `at`."""
        starts = torch.tensor([0, *n_tokens]).cumsum(0).int()
        return self._builder(name, at.device).build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=whole.seq_lens[requests].contiguous(),
                num_reqs=len(requests),
                num_actual_tokens=len(at),
                max_query_len=max(n_tokens),
                max_seq_len=whole.max_seq_len,
                block_table_tensor=whole.block_table[requests].contiguous(),
                slot_mapping=whole.slot_mapping[at].contiguous(),
            ),
        )

    def _builder(self, name: str, device: torch.device) -> Any:
        if name not in self._builders:
            layer = get_layers_from_vllm_config(self._config, Attention)[name]
            make = layer.get_attn_backend().get_builder_cls()
            spec = layer.get_kv_cache_spec(self._config)
            self._builders[name] = make(spec, [name], self._config, device)
        return self._builders[name]
