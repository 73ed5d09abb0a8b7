"""The start of vLLM: our options turned into its arguments, and the engine that they make."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

from juice.engine.contract import ModelDescription, free_bytes
from juice.engine.load_options import MAX_PREFILL_TOKENS, Limits
from juice.engine.request import MAX_TOP_LOGPROBS
from juice.engine.vllm.arguments import Layers
from juice.engine.vllm.engine import VllmEngine
from juice.engine.vllm.processes import PROCESSOR, SCHEDULER, STRUCTURES
from juice.errors import UnsupportedModelError, UsageError

# What these do cannot be checked against two runs of plain tokens.
REFUSED = (
    "speculative_config",
    "enable_lora",
    "cpu_offload_gb",
    "decode_context_parallel_size",
    "data_parallel_size",
)
OURS = {
    "model": "give it to juice",
    "tokenizer": "it is the model's",
    "model_impl": "only vLLM's classes of transformers models are steered",
    "tensor_parallel_size": "use tp",
    "pipeline_parallel_size": "use pp",
    "max_model_len": "use max_model_len of the limits (--max-model-len)",
    "max_num_seqs": "use max_batch of the limits (--max-batch)",
    "kv_cache_memory_bytes": "use kv_memory_bytes of the limits (--kv-memory)",
    "dtype": "use dtype",
    "quantization": "use quantization",
    "revision": "use revision",
    "scheduler_cls": "it keeps apart what is steered differently in the prefix cache",
    "worker_extension_cls": "it is asked by the check at the start",
    "logits_processors": "it writes the coefficients of the batch",
    "additional_config": "it holds the layers to steer",
    "skip_tokenizer_init": "JuICE makes the text itself",
}


def started(
    model: str,
    description: ModelDescription,
    layers: Layers,
    limits: Limits,
    given: dict[str, Any],
    **others: Any,
) -> VllmEngine:
    """Return a running engine, which is still to be checked.

    `given` are more of vLLM's own options, from the user; `others` are ours, in vLLM's terms.

    Raises:
        UsageError: vLLM has no such option, or does not accept its value.
        UnsupportedModelError: The model cannot be steered exactly.
        JuiceError: vLLM does not start.
    """
    check_options(given)
    check_stages(layers.window, description.n_layers, others["pipeline_parallel_size"])
    if current_platform.is_cpu() and others["dtype"] == "auto":
        others["dtype"] = "float32"
    arguments = engine_arguments(model, layers, limits, {**others, **given})
    if current_platform.is_cpu() and limits.kv_memory_bytes is None:
        arguments["kv_cache_memory_bytes"] = _memory_on_cpu(arguments, limits, len(layers.window))
    return VllmEngine(description, AsyncEngineArgs(**arguments), layers, limits)


def _memory_on_cpu(arguments: dict[str, Any], limits: Limits, n_shadows: int) -> int:
    """Return the bytes that a rank takes on a CPU for keys and values, where nobody said.

    Enough for a full batch of full contexts, if half of the fullest memory node is. vLLM itself
    would take 0.92 of a node, write all of it, and not start where less is free.
    """
    given = AsyncEngineArgs(**arguments)
    n_ranks = given.tensor_parallel_size * given.pipeline_parallel_size
    nodes = (get_memory_node_info(node).available_memory for node in get_visible_memory_node())
    half = min(free_bytes(torch.device("cpu")), *nodes) // 2
    model = given.create_model_config()
    layers = model.get_total_num_hidden_layers() + n_shadows
    per_token = layers * 2 * model.get_total_num_kv_heads() * model.get_head_size() * 4
    # One more than the batch, for the last block of each, which is rarely full.
    return min(half, (limits.max_batch + 1) * model.max_model_len * per_token) // n_ranks


def engine_arguments(
    model: str, layers: Layers, limits: Limits, others: dict[str, Any]
) -> dict[str, Any]:
    """Return vLLM's arguments for a steered model."""
    kv_memory = limits.kv_memory_bytes
    if kv_memory is not None:  # of all ranks; vLLM is told that of one
        kv_memory //= others["tensor_parallel_size"] * others["pipeline_parallel_size"]
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "model_impl": "transformers",
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_batch,
        "max_num_batched_tokens": max(
            limits.max_prefill_tokens or MAX_PREFILL_TOKENS, limits.max_batch
        ),
        "max_logprobs": MAX_TOP_LOGPROBS,
        "kv_cache_memory_bytes": kv_memory,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "scheduler_cls": SCHEDULER,
        "worker_extension_cls": "juice.engine.vllm.worker.WorkerExtension",
        "logits_processors": [PROCESSOR, STRUCTURES],
        "additional_config": layers.to_config(),
        **others,
    }


def check_options(given: dict[str, Any]) -> None:
    """Raise UsageError for an option that vLLM does not have, or that could make steering wrong."""
    known = {field.name for field in fields(AsyncEngineArgs)}
    for name in given:
        if name not in known:
            raise UsageError(f"vllm_args names {name!r}, which is not an option of vLLM")
        if name in REFUSED:
            raise UsageError(
                f"vllm_args names {name!r}, with which steering is not exact; leave it out"
            )
        if name in OURS:
            raise UsageError(f"vllm_args names {name!r}, which JuICE sets itself: {OURS[name]}")


def has_invariant_mode() -> bool:
    """Return whether vLLM has kernels here whose results do not depend on the batch."""
    return not current_platform.is_cpu()


def check_stages(window: range, n_layers: int, n_stages: int) -> None:
    """Raise UnsupportedModelError for a window in more than one stage, or for stages on CPUs.

    Between stages go the hidden states of the batch's tokens alone, not those of companions.
    """
    if n_stages > 1 and current_platform.is_cpu():
        raise UnsupportedModelError(
            f"pp={n_stages}: vLLM's scheduler fails with stages on CPUs, steered or not; use tp"
        )
    stages = [get_pp_indices(n_layers, rank, n_stages) for rank in range(n_stages)]
    within = [f"{first}-{last - 1}" for first, last in stages]
    if window and not any(first <= window.start and window.stop <= last for first, last in stages):
        raise UnsupportedModelError(
            f"the window is layers {window.start} to {window.stop - 1}, but with pp={n_stages} the "
            f"stages have the layers {', '.join(within)}: choose a window within one of them, "
            "other stages with VLLM_PP_LAYER_PARTITION, or tp instead of pp"
        )
