"""A model's description and the place of its weights, without loading them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from juice.engine import ModelDescription
from juice.errors import ModelNotFoundError
from juice.loading.pretrained import explain, source_of, weights_folder
from juice.model.description import describe
from juice.model.fingerprint import identify_model
from juice.model.layout import resolve
from juice.options import LoadOptions


def describe_stored(model: str, options: LoadOptions, **how: Any) -> ModelDescription:
    """Return the description of a stored model.

    Args:
        model: A hub id, a local folder, or `mini`.
        options: Its revision.
        how: How it is to run; see `juice.model.description`.

    Raises:
        ModelNotFoundError: The model cannot be found.
        UnsupportedModelError: It has no heads that can be steered.
    """
    source = source_of(model)
    where: dict[str, Any] = {"revision": options.revision, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
        config = AutoConfig.from_pretrained(source, **where)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a damaged folder makes the libraries raise
        raise ModelNotFoundError(explain(model, error, {})) from error
    with suppress(OSError):  # a model without one stops where its configuration says
        network.generation_config = GenerationConfig.from_pretrained(source, **where)
    layout = resolve(network)
    identity = identify_model(
        network,
        layout,
        model_id=model,
        revision=options.revision,
        folder=weights_folder(source, options.revision),
    )
    return describe(network, tokenizer, layout, identity, **how)
