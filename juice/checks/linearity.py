"""The check that projections, each run alone, are linear a row at a time.

A projection f must satisfy

    f(x + y) - f(0) = (f(x) - f(0)) + (f(y) - f(0))      with f(x) the same next to any other row

up to the rounding of its dtype. Quantised weights keep both; quantised activations keep neither:
the result for a row depends on its largest value, or on that of other rows. Then a scaled head is
not a scaled head output, and what a row gets depends on its batch.

x and y are chosen so that any dtype adds them without rounding and any grid shows: a few columns of
1 among columns below half a step of 8 bits (for a grid scaled to the row), and six-bit values (for
a fixed grid, or that of an 8-bit float). Every projection is checked, because layers differ. Not
covered are experts that are not modules of their own, and those that no token reaches.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from juice.checks.two_runs import refusing
from juice.errors import UnsupportedModelError
from juice.model.layout import Layout, features
from juice.model.loaded import uncompiled
from juice.model.steering_hooks import hooked, in_this_thread

# Relative to the output's norm. 8-bit activations are off by 0.017 and more; bfloat16, which some
# 4-bit kernels use whatever their input, rounds by 0.004, TF32 and float16 by less.
TOLERANCE = 8e-3
N_BETWEEN = 32
BELOW_A_STEP = 0.4 / 127
LOUD = 300.0
ROUNDINGS = 4


@torch.inference_mode()
def why_not_linear(model: PreTrainedModel, layout: Layout, device: torch.device) -> str | None:
    """Return the projection that couples rows or is not additive, in words; None for none.

    Raises UnsupportedModelError for a model that cannot run, JuiceError for lack of memory.
    """
    projections = {
        m for layer in layout.layers for m in layer.layer.modules() if features(m) is not None
    } | {layout.output}
    with uncompiled(list(model.modules())):
        seen = _inputs(model, projections, device)
        names = {module: name for name, module in model.named_modules()}
        if missed := [layer.index for layer in layout.layers if layer.projection not in seen]:
            raise UnsupportedModelError(
                f"{type(model).__name__}: steering did not reach layers {missed}: their output "
                "projections were bypassed"
            )
        for module, like in seen.items():
            if reason := _why_not(module, like):
                return f"{names[module]} {reason}"
    return None


def _inputs(
    model: PreTrainedModel, projections: set[nn.Module], device: torch.device
) -> dict[nn.Module, torch.Tensor]:
    """Return the input of each projection in a forward, [..., width], for its device and dtype."""
    seen: dict[nn.Module, torch.Tensor] = {}

    def keep(module: nn.Module, args: tuple[object, ...]) -> None:
        if len(args) == 1 and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            seen[module] = args[0]

    ids, name = torch.zeros(1, 2, dtype=torch.int64, device=device), type(model).__name__
    handles = (m.register_forward_pre_hook(in_this_thread(keep)) for m in projections)
    with refusing(name, f"{name} cannot run"), hooked(handles):
        model(input_ids=ids, use_cache=False)
    return seen


def _why_not(module: nn.Module, like: torch.Tensor) -> str | None:
    """Return the failure of a projection of inputs [..., width] to be linear; None without one."""
    rows, loud = _rows(like)
    # Without the bias: the larger it is, the more the output is rounded.
    bias = module._parameters.get("bias")
    changed = {} if bias is None or bias.is_meta else {"bias": torch.zeros_like(bias)}
    alone, beside = (
        functional_call(module, changed, (x,)) for x in (rows, torch.cat([rows, loud]))
    )
    if not isinstance(alone, torch.Tensor) or len(alone) != len(rows):
        return None
    # A bias on "meta", fetched for each forward, is still there: allow for its rounding.
    slack = ROUNDINGS * torch.finfo(alone.dtype).eps * float(alone[-1].float().norm())
    alone, beside = alone.float(), beside[: len(rows)].float()
    moved = _relative(beside - alone, alone - alone[-1:], slack)
    if not moved <= TOLERANCE:  # or NaN
        return f"gives a row a different output next to another row, by {moved:.2g} of its size"
    zero = alone[-1]
    for first in (0, 3):
        x, y, both = alone[first : first + 3] - zero
        bent = _relative(both - x - y, both, slack)
        if not bent <= TOLERANCE:
            return f"is not additive, by {bent:.2g} of its output's size"
    return None


def _rows(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows to run, [7, 1, width], and a much larger one, [1, 1, width].

    The rows are x, y and x + y of both kinds, and zeros.
    """
    columns, random = torch.arange(like.shape[-1]), torch.Generator().manual_seed(0)
    noise = torch.randn(len(columns), generator=random)
    is_peak = columns % N_BETWEEN == 0
    peaks, low = (
        is_peak * (1.0 - 2.0 * (columns // N_BETWEEN % 2)),
        ~is_peak * BELOW_A_STEP * noise.sign(),
    )
    x, y = torch.randint(-60, 61, (2, len(columns)), generator=random) / 64
    made = torch.stack([peaks, low, peaks + low, x, y, x + y, torch.zeros_like(x)])[:, None]
    return made.to(like), (LOUD * noise).to(like)[None, None]


def _relative(error: torch.Tensor, of: torch.Tensor, slack: float) -> float:
    """Return the largest norm of a row's error, less `slack`, over the norm of the row.

    Both are [rows, 1, features]; rows of zeros do not count.
    """
    sizes = of.norm(dim=-1)
    ratios = (error.norm(dim=-1) - slack)[sizes > 0] / sizes[sizes > 0]
    return float(ratios.max()) if ratios.numel() else 0.0
