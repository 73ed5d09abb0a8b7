"""What bounds the engine: how many requests, how long, and how much memory their keys and values may take.

Memory is reserved when a request joins, for its prompt and all of its `max_tokens`, so that nothing that runs is ever
evicted; a request for which there is no room waits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from juice.errors import RequestError

MIB = 1 << 20
CGROUP = Path("/sys/fs/cgroup")
# The rest is for the activations, and on a machine's own memory for everything else that runs there.
SHARE_OF_FREE = {"cuda": 0.8, "cpu": 0.5, "mps": 0.5}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of one engine.

    `max_batch` requests run at once; `max_model_len` tokens, prompt and new ones, a request (None: the model's context);
    `kv_memory_bytes` for keys and values (None: a share of what is free once the model is loaded); `max_prefill_tokens`
    padded tokens of prompts between two decode steps; `max_waiting` requests in the inbox.
    """

    max_batch: int = 64
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    max_prefill_tokens: int = 2048
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_model_len", "kv_memory_bytes", "max_prefill_tokens", "max_waiting"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} is {value}; expected at least 1", param=name)

    def settled(self, max_positions: int | None, device: torch.device, n_ranks: int = 1) -> Limits:
        """Return the bounds for a loaded model, with what was left open chosen; raises RequestError beyond the model's context."""
        if self.max_model_len and max_positions and self.max_model_len > max_positions:
            raise RequestError(
                f"max_model_len is {self.max_model_len}; the model has a context of {max_positions} tokens", param="max_model_len"
            )
        # Ranks have a GPU each, but share a machine's own memory.
        share = SHARE_OF_FREE.get(device.type, 0.5) / (n_ranks if device.type == "cpu" else 1)
        return replace(
            self,
            max_model_len=self.max_model_len or max_positions,
            kv_memory_bytes=self.kv_memory_bytes or max(MIB, int(share * free_bytes(device))),
        )


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free on a device; for a CPU, what the machine and its control group leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = _available_bytes()
    try:
        # A container's bound; "max" where there is none.
        bound, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return available
    return min(available, max(0, bound - used))


def _available_bytes() -> int:
    """Return what a machine can give without swapping; where it does not tell, half of what it has."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
