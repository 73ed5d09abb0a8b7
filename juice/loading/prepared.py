"""Prepare a transformers model for steering: find its heads, install the hooks, check both."""

from __future__ import annotations

import warnings
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from juice.errors import UnsupportedModelError
from juice.exactness.head_check import check_heads
from juice.exactness.linearity_check import why_not_linear
from juice.exactness.threads import one_if_small
from juice.model.fingerprint import identify_model
from juice.model.layout import resolve
from juice.model.loaded import LoadedModel, input_device
from juice.model.logits import LogitPositions
from juice.model.masks import attention_pattern
from juice.model.positions import rope_switch
from juice.model.row_routing import RowRouting
from juice.model.steering_hooks import SteeringHooks


def prepare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_id: str | None = None,
    revision: str | None = None,
    folder: Path | None = None,
    allow_approximate: bool = False,
) -> LoadedModel:
    """Find the heads of a transformers model in memory, install the hooks and check both.

    Args:
        model: The model, which is not steered already.
        tokenizer: Its tokenizer.
        model_id: Its hub id or folder; None: the name in its configuration.
        revision: Its revision on the hub.
        folder: Its weight files, for the fingerprint; None: the weights in memory.
        allow_approximate: Accept quantised activations, with a warning.

    Raises:
        UnsupportedModelError: The model cannot be steered exactly, or is steered or sharded
            already.
    """
    if getattr(model, "_juice_hooked", False):
        raise UnsupportedModelError(
            "this model object is already steered; use the SteeredModel that was made from it"
        )
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise UnsupportedModelError(
            "this model object is sharded; give juice.load its folder or hub id, with "
            'engine="vllm" and tp=N'
        )
    layout = resolve(model)
    pattern = attention_pattern(model)
    identity = identify_model(
        model,
        layout,
        model_id=model_id or model.config.name_or_path or type(model).__name__,
        revision=revision,
        folder=folder,
    )
    model.eval()
    with one_if_small(model):
        reason = why_not_linear(model, layout, input_device(model))
    if reason is not None:
        problem = f"{type(model).__name__} cannot be steered exactly: {reason}"
        if not allow_approximate:
            raise UnsupportedModelError(
                f"{problem}. Its activations are quantised: "
                "load it with quantised weights alone (bnb-4bit, torchao-int8) or with none, "
                "or accept approximate steering with allow_approximate=True (--allow-approximate)"
            )
        warnings.warn(f"{problem}; every answer reports `exact: false`", stacklevel=2)
    model._juice_hooked = True
    hooks = RowRouting(layout), SteeringHooks(layout), LogitPositions(layout)
    loaded = LoadedModel(
        model,
        tokenizer,
        layout,
        pattern,
        rope_switch(model),
        *hooks,
        identity,
        modules=tuple(model.modules()),
        exact=reason is None,
    )
    try:
        with one_if_small(model):
            check_heads(loaded)
    except BaseException:
        loaded.release()
        raise
    return loaded
