"""A name for everything that decides the bits of an answer beside the request itself.

Two engines with one name give a request, alone, the same tokens and log-probabilities; where
anything differs that may change them, so does the name. It knows the model by its fingerprint, not
by its folder. It does not know what of the machine changes no numbers, what runs beside a request,
nor the head sets: an answer's `steering` reports those.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from juice.engine.description import ModelDescription
from juice.version import versions

N_DIGITS = 12


def system_fingerprint(
    engine: str, description: ModelDescription, numerics: Mapping[str, Any]
) -> str:
    """Return the name, such as `fp_0123456789ab`.

    Args:
        engine: The engine's name.
        description: The model that it runs.
        numerics: What else decides its numbers, as plain data.
    """
    identity = description.identity.model_dump()
    facts = {
        "versions": versions(),
        "engine": engine,
        "numerics": numerics,
        # Where the weights are known, what they are called changes nothing.
        "model": identity["fingerprint"] or identity,
        "dtype": description.dtype,
        "quantization": description.quantization,
        "n_devices": description.n_devices,
        "processor": _processor(description.device),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"fp_{sha256(text.encode()).hexdigest()[:N_DIGITS]}"


def _processor(device: str) -> list[str | int]:
    """Return what chooses among the kernels of a device: its kind, and a CPU's threads."""
    if device.startswith("cuda"):
        return [torch.cuda.get_device_name()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line for line in lines if line.startswith("model name")), device)
    return [name, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
