"""What the ways of `benchmarks.ways` run, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.shapes import Shape

N_TOKENS, MAX_LEN = 32, 512
ROWS = (1, 4, 16, 64)
MIN_KV_BYTES = 2 << 30


@dataclass(frozen=True)
class Setting:
    """What is measured, and where.

    Args:
        shape: The sizes of the model.
        folder: Its weights.
        device: Where it runs.
        dtype: In which precision.
        share: Of the GPU's memory, what one way may take; None on a CPU.
    """

    shape: Shape
    folder: str
    device: str
    dtype: str
    share: float | None = None

    @property
    def n_weight_bytes(self) -> int:
        """What the weights take."""
        return self.shape.n_weights * getattr(torch, self.dtype).itemsize

    @property
    def n_kv_bytes(self) -> int:
        """What keys and values may take: enough for the most rows at their full length."""
        bytes_each = getattr(torch, self.dtype).itemsize
        return max(MIN_KV_BYTES, self.shape.n_kv_bytes(ROWS[-1] * MAX_LEN, bytes_each))

    @property
    def of_vllm(self) -> dict[str, Any]:
        """What vLLM is told: without a share it would ask for nearly all of the GPU."""
        shared = {} if self.share is None else {"gpu_memory_utilization": self.share}
        return {"enable_prefix_caching": False, **shared}

    def load(self) -> Any:
        """Return the model as transformers loads it."""
        from transformers import LlamaForCausalLM

        dtype = getattr(torch, self.dtype)
        return LlamaForCausalLM.from_pretrained(self.folder, dtype=dtype).to(self.device).eval()
