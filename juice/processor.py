"""The processor that a model runs on without a GPU: what it multiplies, and its threads.

PyTorch splits an operator over threads that wait for one another at its end. A thread that shares
its core with another process keeps all of them waiting: products were ten times slower so.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from juice.errors import UsageError

# What processors call their products of bfloat16, of x86 and of ARM; the fastest first.
BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16")
# With AMX, up to so many rows are 1.1 to 1.5 times as fast with the weight first; for more,
# transposing the result costs what is gained. With AVX512-BF16 alone, fewer than 16 are slower.
N_FEW_ROWS = 16
LOAD_S = 60  # what the first load average is over


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


class WeightFirst(nn.Linear):
    """A linear layer that multiplies few rows with its weight as the first matrix.

    oneDNN packs the second matrix of a product of bfloat16 anew at each call. In `nn.Linear` that
    is the weight, which takes longer to pack than a few rows take to be multiplied.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of rows [..., in_features], [..., out_features]."""
        n_rows = x.numel() // self.in_features
        if n_rows > N_FEW_ROWS:
            return super().forward(x)
        columns = x.reshape(n_rows, self.in_features).t()
        if n_rows == 1:
            column = columns[:, 0]
            product = (
                torch.mv(self.weight, column)
                if self.bias is None
                else torch.addmv(self.bias, self.weight, column)
            )
        else:
            product = (
                torch.mm(self.weight, columns)
                if self.bias is None
                else torch.addmm(self.bias[:, None], self.weight, columns)
            )
        return product.t().contiguous().view(*x.shape[:-1], self.out_features)


def put_weights_first(model: nn.Module) -> None:
    """Turn a model's bfloat16 linear layers on a CPU with AMX into `WeightFirst`.

    Layers of another class, and packed or fetched weights, stay as they are.
    """
    if bfloat16_unit() != "amx_bf16":
        return
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            weight = module.weight.data
            if type(weight) is torch.Tensor and weight.is_cpu and weight.dtype == torch.bfloat16:
                module.__class__ = WeightFirst


def use_threads(n_threads: int | None) -> None:
    """Have PyTorch split operators over so many threads; None leaves them as they are.

    Raises UsageError for fewer than one, or more than there are cores.
    """
    if n_threads is None:
        return
    n_cores = os.cpu_count() or 1
    if not 1 <= n_threads <= n_cores:
        raise UsageError(
            f"threads is {n_threads}; expected 1 to {n_cores}, the cores of this machine"
        )
    torch.set_num_threads(n_threads)


def warn_if_busy() -> None:
    """Warn where other processes have kept all cores busy over the last minute.

    One thread waits for no other, so then there is nothing to warn of.
    """
    n_cores, n_threads = os.cpu_count() or 1, torch.get_num_threads()
    if n_threads == 1 or not hasattr(os, "getloadavg"):
        return
    # A second of work adds at most 1/60 to the average of a minute, and fades from then on.
    ours = min(time.process_time() / LOAD_S, n_threads)
    others = os.getloadavg()[0] - ours
    if others > n_cores:
        warnings.warn(
            f"other processes keep the {n_cores} cores of this machine busy (load average "
            f"{others:.1f}); {n_threads} threads that wait for one another can be ten times slower "
            "on them than one: if that lasts, give --threads (threads=), such as 1",
            stacklevel=3,
        )
