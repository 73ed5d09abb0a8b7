"""Steering under `vllm serve`, without JuICE's server: a model's head sets, and what requests ask.

vLLM is then started by its own command, with the plugin, `JUICE_HEAD_SETS` and, where a set has no
fingerprint, `JUICE_ALLOW_UNVERIFIED`. The middleware `juice_server.vllm_middleware.Steering` turns
the `steer` of a request into coefficients.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any

from juice.engine import ModelDescription, Steer
from juice.engine.steering import resolve
from juice.head_set import HeadSetLibrary
from juice.loading.described import describe_stored
from juice.methods import CONTRASTS
from juice.options import LoadOptions
from juice.vllm.arguments import FIRST, KEY, STRUCTURE, Coefficients, accept_from
from juice.vllm.window import check_layers, choose_window

FIELDS = frozenset({KEY, FIRST, STRUCTURE})  # of `vllm_xargs`, which JuICE alone writes

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
        """Return the model of vLLM's configuration."""
        own = vllm_config.model_config
        return cls(str(own.model), own.revision)

    @cached_property
    def window(self) -> range:
        """The layers of the head sets."""
        return choose_window("auto", self.head_sets.by_name.values(), self.description.n_layers)

    def extra_args(self, steer: Steer) -> dict[str, Any]:
        """Return what travels with a request in vLLM, none for an unsteered one.

        Raises:
            HeadSetError: No head set serves the request.
            RequestError: A value is out of range.
        """
        chosen = None
        if steer.target != "none" and steer.method not in CONTRASTS:
            chosen = self.head_sets.get(
                steer.target if steer.head_set is None else str(steer.head_set)
            )
        steering = resolve(steer, chosen)
        check_layers(steering, self.window)
        coefficients = Coefficients.of(steering)
        return {} if coefficients is None else {KEY: coefficients.to_json()}
