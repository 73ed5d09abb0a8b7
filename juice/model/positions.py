"""Rotary positions whose frequencies depend on how long a sequence is.

Longrope (Phi-3) rotates every key by its short factors up to the original context and by its long
ones beyond it, earlier keys included. A row that crosses over is prefilled again, and no forward
mixes rows from both sides: transformers chooses the factors by the largest position of the call.
Dynamic scaling changes the frequencies only beyond `max_position_embeddings`, where no request may
go.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from juice.model.layout import text_config


def rope_switch(model: PreTrainedModel) -> int | None:
    """Return the number of tokens beyond which a model uses its long factors; None if never."""
    config = text_config(model)
    parameters = getattr(config, "rope_parameters", None) or {}
    for own in (parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))):
        if own.get("rope_type") == "longrope":
            original = own.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            if original is not None and original < config.max_position_embeddings:
                return int(original)
    return None
