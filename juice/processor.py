"""The processor that a model runs on without a GPU: what it multiplies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# What processors call their products of bfloat16, of x86 and of ARM; the fastest first.
BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16")


def bfloat16_unit(capabilities: Mapping[str, Any] | None = None) -> str | None:
    """Return the CPU's name for its products of bfloat16, such as `avx512_bf16`; None without them.

    `capabilities` are the CPU's, by name; None for those of this one, where PyTorch can use them.
    """
    if capabilities is None:
        # It is oneDNN that has these products.
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return None
        # An older PyTorch does not say.
        capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return next((name for name in BFLOAT16_UNITS if capabilities.get(name)), None)
