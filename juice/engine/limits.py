"""The bounds of an engine: how many requests, how long, and in how much memory."""

from __future__ import annotations

from dataclasses import dataclass

from juice.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of one engine.

    Args:
        max_batch: How many requests run at the same time.
        max_model_len: The tokens of a request, prompt and new; None for the model's context.
        kv_memory_bytes: The bytes for keys and values; None for a share of the memory left free.
        max_prefill_tokens: What a step may cost, in tokens of a short prompt.
        max_waiting: How many requests may wait.

    Raises:
        RequestError: A bound is below 1.
    """

    max_batch: int = 64
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    max_prefill_tokens: int = 2048
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise RequestError(f"{name} is {value}; expected at least 1", param=name)
