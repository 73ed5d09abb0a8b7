"""How much memory keys and values may take, where the limits leave that open."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from juice.engine.limits import Limits
from juice.errors import RequestError

MIB = 1 << 20
CGROUP = Path("/sys/fs/cgroup")
# The rest is for the activations and, in main memory, for everything else on the machine.
SHARE_OF_FREE = {"cuda": 0.8, "cpu": 0.5, "mps": 0.5}


def settled(limits: Limits, max_positions: int | None, device: torch.device) -> Limits:
    """Return the limits for a loaded model, with the open ones filled in.

    Args:
        limits: The limits as given; None in them is open.
        max_positions: The model's context in tokens; None where it has no end.
        device: The device that holds the keys and values.

    Raises:
        RequestError: `max_model_len` is beyond the model's context.
    """
    if limits.max_model_len and max_positions and limits.max_model_len > max_positions:
        raise RequestError(
            f"max_model_len is {limits.max_model_len}; the model has a context of {max_positions} "
            "tokens: choose at most that",
            param="max_model_len",
        )
    share = SHARE_OF_FREE.get(device.type, 0.5)
    return replace(
        limits,
        max_model_len=limits.max_model_len or max_positions,
        kv_memory_bytes=limits.kv_memory_bytes or max(MIB, int(share * free_bytes(device))),
    )


def free_bytes(device: torch.device) -> int:
    """Return the bytes free on a device; for a CPU, what the machine and its cgroup leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = _available_bytes()
    try:
        # A container's limit; "max" where there is none.
        bound, used = (
            int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):
        return available
    return min(available, max(0, bound - used))


def _available_bytes() -> int:
    """Return the memory available without swapping; where that is unknown, half of all memory."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
