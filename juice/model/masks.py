"""The masks of attention, additive, and the length at which rotary frequencies switch.

Rows of a batch have different lengths and start at position 0 of their slot, so the key at slot
position j is visible to the query at position p when j <= p, and p - j < sliding window in a layer
with a sliding window. A ready-made 4D mask replaces the one a model would build, so the sliding
window must be folded in, one mask for each kind of layer. A model whose attention does more than
that (ALiBi from a 2D mask, chunks, a causal mask by the number of keys) keeps its own masks.

Longrope (Phi-3) rotates every key by its short factors up to the original context and by its long
ones beyond it, earlier keys included. A row that crosses over is prefilled again, and no forward
mixes rows from both sides: transformers chooses the factors by the largest position of the call.
Dynamic scaling changes the frequencies only beyond `max_position_embeddings`, where no request may
go.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig, PreTrainedModel

from juice.errors import UnsupportedModelError
from juice.model.layout import text_config

TAKING_MASKS = ("eager", "sdpa", None)  # flash and flex attention have their own kinds of mask
# BLOOM adds ALiBi; GPT-Neo masks by the number of keys, whatever masks and positions it is given.
MASKING_MODEL_TYPES = ("bloom", "gpt_neo")
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class AttentionPattern:
    """The kinds of attention in a model.

    `sliding_windows` has the sliding window of each kind, None for full attention. With `by_name`
    the model takes a dict with one mask for each kind. `is_fused` says that it computes causal
    attention without a mask.
    """

    sliding_windows: dict[str, int | None]
    by_name: bool
    is_fused: bool = False

    @property
    def is_causal_alone(self) -> bool:
        """Whether rows with nothing cached need no mask."""
        return self.is_fused and not any(self.sliding_windows.values())

    def narrowed(self, sliding_window: int) -> AttentionPattern:
        """Return the pattern with another sliding window."""
        kinds = self.sliding_windows.items()
        narrow = {kind: None if width is None else sliding_window for kind, width in kinds}
        return replace(self, sliding_windows=narrow)

    def masks(
        self, positions: torch.Tensor, n_keys: int, dtype: torch.dtype
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the additive masks [rows, 1, queries, n_keys], in a dict if `by_name`.

        `positions` are those of the queries: int64 [rows, queries].
        """
        keys, queries = torch.arange(n_keys, device=positions.device), positions[:, None, :, None]
        masks = {}
        for kind, sliding_window in self.sliding_windows.items():
            hidden = keys > queries  # [rows, 1, queries, n_keys]
            if sliding_window is not None:
                hidden |= keys <= queries - sliding_window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            masks[kind] = mask.masked_fill_(hidden, torch.finfo(dtype).min)
        return masks if self.by_name else next(iter(masks.values()))


def attention_pattern(model: PreTrainedModel) -> AttentionPattern | None:
    """Return the kinds of attention of a model; None for one that must build its own masks.

    Raises UnsupportedModelError for a model that is not causal.
    """
    config = text_config(model)
    if not getattr(config, "is_causal", True) or (
        hasattr(config, "is_decoder") and "bert" in config.model_type and not config.is_decoder
    ):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not causal: its tokens see what follows them; "
            "load a decoder"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    if config._attn_implementation not in TAKING_MASKS or kinds - {FULL, SLIDING}:
        return None
    if getattr(config, "alibi", False) or config.model_type in MASKING_MODEL_TYPES:
        return None
    sliding_window = _sliding_window(model, config)
    if len(kinds) == 2:
        return AttentionPattern({FULL: None, SLIDING: sliding_window}, by_name=True)
    only = kinds.pop() if kinds else (SLIDING if sliding_window else FULL)
    return AttentionPattern(
        {only: sliding_window if only == SLIDING else None},
        by_name=False,
        is_fused=config._attn_implementation == "sdpa",
    )


def _sliding_window(model: PreTrainedModel, config: PretrainedConfig) -> int | None:
    """Return the sliding window; many configurations have a number that no code reads."""
    code = sys.modules[type(model.get_decoder()).__module__]  # of what a wrapper has within
    if getattr(config, "use_sliding_window", True) is False or not hasattr(
        code, "create_sliding_window_causal_mask"
    ):
        return None
    return getattr(config, "sliding_window", None)


@contextmanager
def narrow_sliding_windows(model: PreTrainedModel, sliding_window: int | None) -> Iterator[None]:
    """Give a model's masks another sliding window, if given and if they have one, while within."""
    if sliding_window is None:
        yield
        return
    config = text_config(model)
    before = getattr(config, "sliding_window", None)
    if not before:
        yield
        return
    config.sliding_window = sliding_window
    try:
        yield
    finally:
        config.sliding_window = before


def rope_switch(model: PreTrainedModel) -> int | None:
    """Return the number of tokens beyond which a model uses its long factors; None if never."""
    config = text_config(model)
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))):
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            if original is not None and original < config.max_position_embeddings:
                return int(original)
    return None
