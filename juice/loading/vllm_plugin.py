"""vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`)."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import torch

from juice.loading.plain_vllm import PlainVllm
from juice.vllm.window import set_default

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
        set_default(_window)
    # vLLM's attention in bfloat16 on CPUs uses tile registers (AMX) without asking the system for
    # them: unless something else has, its process ends with an illegal instruction.
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _window(config: VllmConfig) -> range:
    """Return the window of a model that vLLM's own command serves, and say what is missing there.

    JuICE's own starts give vLLM theirs, and are checked.
    """
    window = PlainVllm.of(config).window
    if window:
        logging.getLogger("vllm.juice").warning(
            "layers %d to %d can be steered; this is not checked here: `juice doctor --engine "
            "vllm` checks it",
            window.start,
            window.stop - 1,
        )
    return window
