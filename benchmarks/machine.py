"""The machine that numbers were measured on."""

from __future__ import annotations

import os
import platform

import torch
import transformers


def describe() -> dict[str, object]:
    """Return what a reader needs to judge a number: processors and versions."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
