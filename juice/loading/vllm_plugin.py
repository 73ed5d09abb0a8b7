"""vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`)."""

from __future__ import annotations

import logging
import os
from multiprocessing import parent_process

from juice.loading.plain_vllm import PlainVllm
from juice.vllm.window import set_default

CLASSES = {
    "TransformersForCausalLM": "juice.vllm.model:SteeredCausalLM",
    "TransformersMoEForCausalLM": "juice.vllm.model:SteeredMoECausalLM",
    "TransformersMultiModalForCausalLM": "juice.vllm.model:MultiModalCausalLM",
    "TransformersMultiModalMoEForCausalLM": "juice.vllm.model:MultiModalMoECausalLM",
}


def register() -> None:
    """Put our model classes in place of those of vLLM's transformers backend.

    They steer where JuICE starts vLLM, and under `vllm serve` with JUICE_HEAD_SETS; otherwise they
    do what vLLM's own do.
    """
    from vllm import ModelRegistry

    for name, target in CLASSES.items():
        ModelRegistry.register_model(name, target)
    if os.environ.get("JUICE_HEAD_SETS"):
        set_default(lambda config: PlainVllm.of(config).window)
        if parent_process() is None:
            logging.getLogger("vllm.juice").warning(
                "steering is not checked at this start; `juice doctor --engine vllm` checks it"
            )
