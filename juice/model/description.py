"""A model in the terms of the engines' contract, from its modules; no weight is read."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from juice.engine import ModelDescription
from juice.head_set import ModelIdentity
from juice.model.layout import Layout, text_config


def describe(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
    identity: ModelIdentity,
    **how: Any,
) -> ModelDescription:
    """Return a model's description.

    Args:
        model: The model; its weights may be on the meta device.
        tokenizer: Its tokenizer.
        layout: Its layers and heads.
        identity: Its identity.
        how: How it runs: the fields of ModelDescription that the model does not know.
    """
    return ModelDescription(
        identity=identity,
        tokenizer=tokenizer,
        heads_per_layer=tuple(layer.n_heads for layer in layout.layers),
        max_positions=max_positions(model),
        vocabulary_size=vocabulary_size(model),
        stop_token_ids=stop_token_ids(model, tokenizer),
        **how,
    )


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the model's context in tokens; None where its positions are unlimited."""
    config = text_config(model)
    named = (getattr(config, field, None) for field in ("max_position_embeddings", "max_seq_len"))
    return next((value for value in named if isinstance(value, int)), None)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of tokens that the model knows; its tokenizer may name more or fewer."""
    return int(text_config(model).vocab_size)


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end a generation."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = tokenizer.eos_token_id
    named = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return frozenset(token for token in named if 0 <= token < vocabulary_size(model))
