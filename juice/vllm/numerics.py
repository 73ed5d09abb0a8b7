"""Which of vLLM's arguments decide the numbers that a request gets alone."""

from __future__ import annotations

from dataclasses import fields

from vllm.engine.arg_utils import AsyncEngineArgs

# Where the model lies, how much fits, and what is reported: no number depends on them.
OTHERS = frozenset(
    {
        "model",
        "revision",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "max_num_seqs",
        "max_model_len",
        "max_logprobs",
        "disable_log_stats",
        "use_tqdm_on_load",
    }
)


def numeric(arguments: AsyncEngineArgs) -> dict[str, str]:
    """Return the arguments that are not at their defaults and may change numbers, as text."""
    own = {field.name: getattr(arguments, field.name) for field in fields(arguments)}
    defaults = AsyncEngineArgs(model=arguments.model)
    return {
        name: str(value)
        for name, value in own.items()
        if name not in OTHERS and value != getattr(defaults, name)
    }
