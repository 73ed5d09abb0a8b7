"""A model ready to be steered; how it was loaded is not known here."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from juice.engine import ModelDescription
from juice.head_set import ModelIdentity
from juice.model.layout import Layout, text_config
from juice.model.logits import LogitPositions
from juice.model.masks import AttentionPattern
from juice.model.ranks import Ranks
from juice.model.row_routing import RowRouting
from juice.model.sharding import WHOLE, Shard
from juice.model.steering_hooks import SteeringHooks
from juice.model.uncompiled import uncompiled


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to be steered: its parts, its hooks and its identity.

    `mask_pattern` is None where the model must build its own masks; `rope_switch` is the number of
    tokens beyond which its positions change, if they do.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layout: Layout
    mask_pattern: AttentionPattern | None
    rope_switch: int | None
    routing: RowRouting
    steering_hooks: SteeringHooks
    logits: LogitPositions
    identity: ModelIdentity
    modules: tuple[nn.Module, ...]
    # False where the projections are not linear row by row: then steering is approximate, and
    # every answer reports it.
    exact: bool = True
    # Held during a forward: the hooks carry one plan at a time.
    turn: RLock = field(default_factory=RLock)
    # This process' part of a sharded model and, on rank 0, the other ranks.
    shard: Shard = WHOLE
    ranks: Ranks | None = None

    def release(self) -> None:
        """Remove the hooks, so that the model can be loaded again, and end any other ranks."""
        for handle in (*self.routing.handles, *self.steering_hooks.handles, *self.logits.handles):
            handle.remove()
        self.model._juice_hooked = False
        if self.ranks is not None:
            self.ranks.close()

    def run(self, **inputs: Any) -> Any:
        """Run one forward, uncompiled, and return the model's output."""
        with uncompiled(self.modules):
            return self.model(**inputs)

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return input_device(self.model)

    @property
    def n_ranks(self) -> int:
        """The number of devices over which the model is sharded."""
        return self.ranks.n_ranks if self.ranks else 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def quantization(self) -> str | None:
        """How the weights are quantised, such as bitsandbytes-4bit or torchao.

        None where transformers knows of no quantisation.
        """
        config = getattr(self.model.config, "quantization_config", None)
        if config is None:
            return None
        values: dict[str, Any] = config if isinstance(config, dict) else config.to_dict()
        method = values.get("quant_method")
        bits = next((f"-{n}bit" for n in (4, 8) if values.get(f"load_in_{n}bit")), "")
        return f"{getattr(method, 'value', method)}{bits}"

    @property
    def max_positions(self) -> int | None:
        """The model's context in tokens; None where its positions are unlimited."""
        config = text_config(self.model)
        named = (
            getattr(config, field, None) for field in ("max_position_embeddings", "max_seq_len")
        )
        return next((value for value in named if isinstance(value, int)), None)

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens that the model knows; its tokenizer may name more or fewer."""
        return int(text_config(self.model).vocab_size)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end a generation."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        if ids is None:
            ids = self.tokenizer.eos_token_id
        named = ids if isinstance(ids, list) else [] if ids is None else [ids]
        return frozenset(token for token in named if 0 <= token < self.vocabulary_size)

    def describe(self) -> ModelDescription:
        """Return the model's description in the terms of the engine contract."""
        return ModelDescription(
            identity=self.identity,
            tokenizer=self.tokenizer,
            heads_per_layer=tuple(layer.n_heads for layer in self.layout.layers),
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            n_devices=self.n_ranks,
            quantization=self.quantization,
            max_positions=self.max_positions,
            vocabulary_size=self.vocabulary_size,
            stop_token_ids=self.stop_token_ids,
            exact=self.exact,
        )


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device of a model's inputs.

    Where the embedding is fetched for each forward, that is the device it computes on.
    """
    embedding = model.get_input_embeddings()
    if embedding.weight.device.type != "meta":
        return torch.device(embedding.weight.device)
    return torch.device(
        getattr(getattr(embedding, "_hf_hook", None), "execution_device", None) or "cpu"
    )
