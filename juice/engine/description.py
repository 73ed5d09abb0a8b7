"""Facts about an engine's model: enough to tokenise, match head sets and inform clients."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from juice.head_set import ModelIdentity


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelDescription:
    """A served model.

    Args:
        identity: Its id, revision, architecture, shape and fingerprint.
        tokenizer: Its tokenizer.
        heads_per_layer: The query heads of every layer.
        dtype: The dtype of the activations, such as `bfloat16`.
        device: Where inputs go, such as `cuda:0`.
        n_devices: How many devices it is sharded over.
        quantization: How the weights are quantised; None where they are not.
        max_positions: The model's context in tokens; None where its positions have no end.
        vocabulary_size: The number of tokens in the model; a tokenizer may have more or fewer.
        stop_token_ids: The tokens that end a generation.
        exact: Whether it is steered exactly; false where activations are quantised.
    """

    identity: ModelIdentity
    tokenizer: PreTrainedTokenizerBase
    heads_per_layer: tuple[int, ...]
    dtype: str
    device: str
    n_devices: int = 1
    quantization: str | None = None
    max_positions: int | None
    vocabulary_size: int
    stop_token_ids: frozenset[int]
    exact: bool = True

    @property
    def n_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.heads_per_layer)
