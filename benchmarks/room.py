"""How many ways have room on a device at once: what one takes beside what the device has free."""

from __future__ import annotations

import gc

import torch

from benchmarks.setting import Setting

# Beside weights, keys and values: CUDA itself, graphs, and the activations of the most prompts.
N_OTHER_BYTES = 3 << 30


def n_needed_bytes(setting: Setting) -> int:
    """Return what one way takes of the device."""
    return setting.n_weight_bytes + setting.n_kv_bytes + N_OTHER_BYTES


def n_at_once(n_free_bytes: int, setting: Setting) -> int:
    """Return how many ways have room at once."""
    return n_free_bytes // n_needed_bytes(setting)


def groups(names: list[str], base: str, n: int | None) -> list[list[str]]:
    """Return the ways in groups of at most n, in order, each with the base if that is among them.

    None: there is room for all.
    """
    others = [name for name in names if name != base]
    if n is None or len(names) <= n:
        return [names]
    size = max(1, n - (base in names))
    parts = [others[i : i + size] for i in range(0, len(others), size)]
    return [[*part, *([base] if base in names else [])] for part in parts]


def memory(device: str) -> tuple[int, int]:
    """Return the bytes that are free on a GPU, and all that it has.

    What this process does not need any more is given back first.
    """
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return free, total
