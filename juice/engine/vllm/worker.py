"""The extension of vLLM's workers (`worker_extension_cls`): their facts, and the two runs.

The definition runs inside the workers, with the same modules, without cache or batch. Every rank
runs its part of the layers; attention is written out, over all tokens at once, and heads are
counted over all ranks. The served path is compared with it at every start
(`juice.checks.two_runs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.forward_context import set_forward_context
from vllm.sequence import IntermediateTensors

from juice.engine.vllm.arguments import Coefficients
from juice.engine.vllm.state import structures_of
from juice.errors import RequestError
from juice.formula import add_scaled
from juice.model.steering_hooks import hooked

# That attend at once: scores of all pairs would take gigabytes beside what vLLM has taken.
N_QUERIES = 256


def two_runs(
    model: Any,
    vllm_config: VllmConfig,
    tokens: Sequence[int],
    coefficients: Coefficients | None,
    n_last: int,
    n_padding: int,
) -> torch.Tensor | None:
    """Return the logits after the last tokens, float32 [n_last, vocabulary].

    None on ranks that do not compute logits.

    Args:
        model: The model of this rank.
        vllm_config: Its configuration.
        tokens: The tokens.
        coefficients: Those of the steered run; None: there is one run, unsteered.
        n_last: The number of last tokens.
        n_padding: The number of tokens after these. They change nothing but how products are
            rounded; where there are any, attention rounds to the dtype of the model, too, as the
            kernels of vLLM do.
    """
    device = model.table.coefficients.device
    ids = torch.tensor([*tokens, *[tokens[0]] * n_padding], device=device)
    positions = torch.arange(len(ids), device=device)

    def run() -> torch.Tensor | None:
        """Return the last hidden states, [tokens, width]; None on ranks of earlier stages."""
        stages, received = get_pp_group(), None
        if not stages.is_first_rank:
            received = IntermediateTensors(stages.recv_tensor_dict())
        with set_forward_context(None, vllm_config, num_tokens=len(ids)):
            hidden = model(ids, positions, received)
        if not stages.is_last_rank:
            stages.send_tensor_dict(hidden.tensors)
            return None
        return hidden

    with torch.inference_mode(), _dense(model, rounded_attention if n_padding else dense_attention):
        clean: dict[int, torch.Tensor] = {}
        with _at_projections(model, clean.__setitem__):
            hidden = run()
        if coefficients is not None:
            with _at_projections(model, _adding(model, coefficients, clean)):
                hidden = run()
        last = slice(len(tokens) - n_last, len(tokens))
        logits = None if hidden is None else model.compute_logits(hidden[last])
    return None if logits is None else logits.float()


def dense_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attend to every earlier token, [1, heads, tokens, d_head] to [tokens, heads * d_head]."""
    attended = rounded_attention(module, query.float(), key.float(), value.float())
    return attended.to(query.dtype)


def rounded_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attend as `dense_attention` does, but round products to the dtype of the heads."""
    groups, positions = query.shape[1] // key.shape[1], torch.arange(query.shape[2])
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    parts = [
        _attended(module, query[:, :, some], key, value, some.to(query.device))
        for some in positions.split(N_QUERIES)
    ]
    return torch.cat(parts, 2)[0].transpose(0, 1).flatten(1)


def _attended(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Attend from some positions, to [1, heads, positions, d_head]."""
    arguments = module.attention_arguments
    scores = (query @ key.transpose(-1, -2)).float() * arguments["scale"]
    if cap := arguments.get("logits_soft_cap"):
        scores = cap * torch.tanh(scores / cap)
    distance = positions[:, None] - torch.arange(key.shape[2], device=key.device)
    hidden = distance < 0
    if window := module.attn.sliding_window:
        hidden |= distance >= window
    scores = scores.masked_fill(hidden, float("-inf"))
    if (sinks := arguments.get("sinks")) is not None:
        sink = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(value.dtype) @ value


@contextmanager
def _dense(model: Any, attention: Any) -> Iterator[None]:
    """Run the model's modules uncompiled, without companions, with attention written out."""
    companions = model.companions
    compiled = [
        module for module in model.modules() if getattr(module, "do_not_compile", None) is False
    ]
    for module in compiled:
        module.do_not_compile = True
    companions.steering = companions.doubled = False
    companions.dense = attention
    try:
        yield
    finally:
        companions.dense = None
        for module in compiled:
            module.do_not_compile = False


def _at_projections(model: Any, act: Any) -> AbstractContextManager[None]:
    """Call act(layer, z) before each projection that can be steered; what it returns is z."""

    def hook(layer: int) -> Any:
        def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            changed = act(layer, args[0])
            return None if changed is None else (changed, *args[1:])

        return before

    return hooked(
        projection.register_forward_pre_hook(hook(layer))
        for layer, projection in model.companions.projections.items()
    )


def _adding(model: Any, coefficients: Coefficients, clean: dict[int, torch.Tensor]) -> Any:
    """Return the hook of the steered run; `clean` has [..., tokens, n_heads * d_head] by layer."""
    n_ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()

    def of_all_ranks(layer: int, z: torch.Tensor) -> torch.Tensor:
        """Return z of every rank, [..., tokens, n_heads * d_head]."""
        width = model.companions.projections[layer].input_size
        return z if z.shape[-1] == width else tensor_model_parallel_all_gather(z)

    def add(layer: int, z: torch.Tensor) -> torch.Tensor:
        before = of_all_ranks(layer, z)
        source = before if coefficients.is_single else of_all_ranks(layer, clean[layer])
        by_head = torch.zeros(model.table.n_heads, device=z.device)
        for at, head, value in coefficients.heads:
            if at == layer:
                by_head[head] = value
        factors = [coefficients.factor(position) for position in range(z.shape[-2])]
        by_token = torch.tensor(factors, device=z.device)[:, None] * by_head
        whole = add_scaled(before, source, by_token)
        return whole if whole.shape == z.shape else whole.chunk(n_ranks, -1)[rank].contiguous()

    return add


class WorkerExtension:
    """Methods that vLLM adds to its worker class; every rank runs them together."""

    vllm_config: Any
    model_runner: Any

    def juice_facts(self) -> dict[str, Any]:
        """Return the facts of this worker: `dtype`, `device`, and what users are told."""
        config, runner = self.vllm_config, self.model_runner
        model = runner.get_model()
        caches = runner.kv_cache_config
        specs = {
            name: group.kv_cache_spec
            for group in caches.kv_cache_groups
            for name in group.layer_names
        }
        by_layer = {name: _spec_of(spec, name) for name, spec in specs.items()}
        n_ranks = config.parallel_config.world_size
        per_token = {
            name: spec.page_size_bytes / spec.block_size for name, spec in by_layer.items()
        }
        layers = config.compilation_config.static_forward_context
        return {
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "device": config.device_config.device_type,
            "block_size": max(spec.block_size for spec in by_layer.values()),
            "n_stages": config.parallel_config.pipeline_parallel_size,
            "runner": "V2" if config.use_v2_model_runner else "V1",
            "attention": sorted({layers[name].attn_backend.get_name() for name in specs}),
            "compiled": model.is_compiled,
            "twin": model.has_twin,
            # vLLM counts the seconds of its own compiler alone, and estimates graphs where it
            # settles the memory for keys and values.
            "compile_s": round(config.compilation_config.compilation_time, 1) or None,
            # PyTorch's own cache lies beside the folders of the variants.
            "n_compiled_bytes": sum(map(_size_of, {Path(at).parent for at in model.compiled_in})),
            "n_graph_bytes": getattr(self, "cudagraph_memory_estimate", None),
            # All of a rank's layers lie in one piece of memory, whose size each entry has.
            "n_kv_bytes": n_ranks * max(tensor.size for tensor in caches.kv_cache_tensors),
            "n_kv_bytes_per_token": round(n_ranks * sum(per_token.values())),
            "n_companion_kv_bytes_per_token": round(
                n_ranks * sum(n for name, n in per_token.items() if ".shadow." in name)
            ),
        }

    def juice_prepare_structures(self, stop_token_ids: list[int]) -> None:
        """Do what the first structure would wait for, on ranks that compute logits."""
        if get_pp_group().is_last_rank:
            with suppress(RequestError):  # of which JuICE's own process tells who asks for one
                structures_of(self.vllm_config.model_config, stop_token_ids).prepare()

    def juice_two_runs(
        self, tokens: list[int], coefficients: str | None, read: list[list[int]], n_padding: int
    ) -> list[list[float]] | None:
        """Return log-probabilities at the last tokens by the definition, on one rank.

        `read` has the tokens whose to return, a list for each of the last tokens. Padding follows.
        """
        model = self.model_runner.get_model()
        steering = None if coefficients is None else Coefficients.from_json(coefficients)
        logits = two_runs(model, self.vllm_config, tokens, steering, len(read) + 1, n_padding)
        if logits is None:
            return None
        scores = logits[:-1].log_softmax(-1)
        return scores.gather(1, torch.tensor(read, device=scores.device)).tolist()


def _size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _spec_of(spec: Any, name: str) -> Any:
    """Return a layer's own spec from its group's."""
    return getattr(spec, "kv_cache_specs", {}).get(name, spec)
