"""What steering needs of vLLM's configuration: a start that lacks it fails, whoever makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from juice.errors import UnsupportedModelError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PROCESSOR = "juice.vllm.rows:RowWriter"
STRUCTURES = "juice.vllm.structures:StructureProcessor"
SCHEDULER = "juice.vllm.scheduler.salting_scheduler"


def check_config(config: VllmConfig) -> None:
    """Raise UnsupportedModelError for a configuration under which steering could be wrong."""
    scheduler = str(config.scheduler_config.scheduler_cls)
    if config.cache_config.enable_prefix_caching and "juice.vllm.scheduler" not in scheduler:
        raise UnsupportedModelError(
            "prefix caching would share what is steered differently: start vLLM with "
            f"--scheduler-cls {SCHEDULER}, or with "
            "--no-enable-prefix-caching"
        )
    processors = config.model_config.logits_processors or []
    if config.use_v2_model_runner:
        raise UnsupportedModelError(
            "nobody has run JuICE on vLLM's V2 model runner: set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if PROCESSOR not in map(str, processors):
        raise UnsupportedModelError(
            f"no request would be steered: start vLLM with --logits-processors {PROCESSOR}"
        )
    if config.speculative_config is not None:
        raise UnsupportedModelError(
            "drafts would be checked with steering that they were not made with: leave out "
            "speculative decoding"
        )
    if config.lora_config is not None:
        raise UnsupportedModelError(
            "heads were found without adapters: leave out LoRA, or merge it into the weights"
        )
