"""The plugin: steering under `vllm serve`, without JuICE's server.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). It is then
started by its own command, with the plugin, `JUICE_HEAD_SETS` and, where a set has no fingerprint,
`JUICE_ALLOW_UNVERIFIED`. The layers of the head sets become part of vLLM's configuration, which all
of its processes share. The middleware `juice_server.vllm.Steering` turns the `steer` of a request
into coefficients.
"""

from __future__ import annotations

import logging
import os
from functools import cache, cached_property
from multiprocessing import current_process, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from juice.engine.contract import ModelDescription
from juice.engine.load_options import LoadOptions
from juice.engine.steer import Steer, resolve
from juice.engine.vllm.arguments import (
    FIRST,
    KEY,
    LAYERS_KEY,
    STRUCTURE,
    Coefficients,
    Layers,
    accept_from,
    choose_layers,
    described,
)
from juice.head_set.library import HeadSetLibrary
from juice.model.identity import describe_stored

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FIELDS = frozenset({KEY, FIRST, STRUCTURE})  # of `vllm_xargs`, which JuICE alone writes


def take_requests() -> None:
    """Let vLLM accept coefficients in this process: JuICE's middleware writes them here."""
    accept_from("the middleware")


class PlainVllm:
    """A model that vLLM serves by its own command.

    Args:
        model: Its hub id or folder.
        revision: Its revision on the hub.

    Raises:
        ModelNotFoundError: The model's files cannot be read here.
        HeadSetError: The folder of head sets does not exist.
    """

    def __init__(self, model: str, revision: str | None = None) -> None:
        self.description: ModelDescription = describe_stored(
            model, LoadOptions(revision=revision), dtype="auto", device="vllm"
        )
        on_trust = os.environ.get("JUICE_ALLOW_UNVERIFIED", "").lower() in ("1", "true")
        self.head_sets = HeadSetLibrary.scan(
            None, self.description.identity, allow_unverified=on_trust
        )

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> PlainVllm:
        """Return the model of vLLM's configuration, with the layers that it was started for."""
        config = vllm_config.model_config
        model = cls(str(config.model), config.revision)
        if (layers := Layers.of(vllm_config)) is not None:
            model.layers = layers
        return model

    @cached_property
    def layers(self) -> Layers:
        """The layers of the head sets, unless vLLM was started for others."""
        return choose_layers("auto", self.head_sets.by_name.values(), self.description.n_layers)

    def extra_args(self, steer: Steer) -> dict[str, Any]:
        """Return the `extra_args` of a request in vLLM, none for an unsteered one.

        Raises:
            HeadSetError: No head set serves the request.
            RequestError: A value is out of range.
        """
        chosen = None
        if steer.uses_heads and steer.inline is None:
            name = steer.target if steer.head_set is None else steer.head_set
            chosen = self.head_sets.get(str(name))
        steering = resolve(
            steer,
            chosen,
            model_id=self.description.identity.id,
            heads_per_layer=self.description.heads_per_layer,
        )
        self.layers.check(steering)
        coefficients = Coefficients.of(steering, n_prompt=0)
        return {} if coefficients is None else {KEY: coefficients.to_json()}


CLASSES = {
    "TransformersForCausalLM": "juice.engine.vllm.model:SteeredCausalLM",
    "TransformersMoEForCausalLM": "juice.engine.vllm.model:SteeredMoECausalLM",
    "TransformersMultiModalForCausalLM": "juice.engine.vllm.model:MultiModalCausalLM",
    "TransformersMultiModalMoEForCausalLM": "juice.engine.vllm.model:MultiModalMoECausalLM",
}


def register() -> None:
    """Put our model classes in place of those of vLLM's transformers backend.

    They steer where JuICE starts vLLM, and under `vllm serve` with JUICE_HEAD_SETS; otherwise they
    do what vLLM's own do.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    end_with_parent()
    for name, target in CLASSES.items():
        ModelRegistry.register_model(name, target)
        if os.environ.get("JUICE_HEAD_SETS"):
            MODELS_CONFIG_MAP[name] = OfHeadSets
    # vLLM's attention in bfloat16 on CPUs uses tile registers (AMX) without asking the system for
    # them: unless something else has, its process ends with an illegal instruction.
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


VLLM_PROCESSES = ("EngineCore", "VllmWorker")


@cache
def end_with_parent() -> None:
    """End a process of vLLM as soon as the one that started it has ended, however that was.

    They wait for a word to end, which one that is killed does not say, and would hold their memory
    for minutes. Another's process, in which vLLM is only called, is left alone.
    """
    parent = parent_process()
    if parent is None or not current_process().name.startswith(VLLM_PROCESSES):
        return

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=follow, name="juice-parent", daemon=True).start()


class OfHeadSets:
    """Adds the layers of the head sets to the configuration of vLLM's own command.

    vLLM asks it, once for each configuration that it makes. JuICE's own starts give theirs.
    """

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Leave the model's part as it is."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Add the layers, and say what is missing there: JuICE's own starts are checked."""
        if LAYERS_KEY in vllm_config.additional_config:
            return
        layers = PlainVllm.of(vllm_config).layers
        vllm_config.additional_config |= layers.to_config()
        if layers.steered:
            logging.getLogger("vllm.juice").warning(
                "%s can be steered, %s in two runs; this is not checked here: `juice doctor "
                "--engine vllm` checks it",
                described(layers.steered),
                described(layers.window),
            )
