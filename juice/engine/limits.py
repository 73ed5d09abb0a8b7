"""What bounds an engine: how many requests, how long, and how much memory their keys and values may take."""

from __future__ import annotations

from dataclasses import dataclass

from juice.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of one engine.

    Args:
        max_batch: Requests that run at once.
        max_model_len: Tokens of a request, prompt and new ones; None: the model's context.
        kv_memory_bytes: Memory for keys and values; None: a share of what is free once the model is loaded.
        max_prefill_tokens: Padded tokens of prompts between two decode steps.
        max_waiting: Requests that may wait.

    Raises:
        RequestError: A bound is below 1.
    """

    max_batch: int = 64
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    max_prefill_tokens: int = 2048
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        for name in (
            "max_batch",
            "max_model_len",
            "kv_memory_bytes",
            "max_prefill_tokens",
            "max_waiting",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} is {value}; expected at least 1", param=name)
