"""The check that heads are where the resolver found them: steering by 1 must double a head.

The attention shows how z splits into heads: its probabilities, or its outputs, have a dimension for
them, [rows, n_heads, ...], before anything is flattened. So a few rows with the same tokens run
twice. The first time each row has its own head steered by 1, through the hooks that steer requests;
the second time, without hooks, that head's probabilities are doubled inside the attention. Both
must make the same difference, and not zero, to what the attention returns in every layer. They do
not for heads read from the wrong columns, key-value heads taken for heads, a bias that is scaled
along, or a projection that bypasses its hook.

TransformerLens, which finds z on its own, is a second opinion.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from juice.checks.two_runs import largest, refusing
from juice.errors import UnsupportedModelError, UsageError
from juice.model.layout import AttentionLayer, text_config
from juice.model.loaded import LoadedModel
from juice.model.steering_hooks import SteeringPlan, at_z, copy_rows, hooked, in_this_thread

N_TOKENS = 3
# Doubling is exact in floating point; only the order of sums differs.
TOLERANCE = 1e-2
NEXT_TO_NOTHING = 1e-3
READS = {"softmax", "scaled_dot_product_attention"}  # where PyTorch code has a dimension for heads


class _Doubling(TorchFunctionMode):
    """Doubles the heads of a plan in an attention's probabilities or fused output."""

    def __init__(self, name: str, plan: SteeringPlan) -> None:
        self.layer: AttentionLayer | None = None
        self.seen: set[int] = set()
        self._name, self._plan = name, plan
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        read = func(*args, **(kwargs or {}))  # [rows, heads, ...] in any of its layouts
        layer = self.layer
        if layer is None or getattr(func, "__name__", "") not in READS:
            return read
        steered, by_head = self._plan.coefficients[layer.index], read
        if read.dim() == 3:  # [rows * heads, tokens, ...]
            by_head = read.view(len(steered), -1, *read.shape[1:])
        elif read.dim() == 5:  # [rows, KV heads, heads of each, tokens, ...]
            by_head = read.flatten(1, 2)
        if by_head.dim() != 4 or by_head.shape[1] != layer.n_heads:
            raise UnsupportedModelError(
                f"{self._name}: the attention of layer {layer.index} has the shape "
                f"{list(read.shape)}; expected [rows, {layer.n_heads} heads, tokens, ...]"
            )
        self.seen.add(layer.index)
        return (by_head * (1 + steered).to(by_head)[..., None, None]).reshape(read.shape)


@torch.inference_mode()
def check_heads(loaded: LoadedModel, n_heads: int = 4) -> float:
    """Check `n_heads` heads, spread out, in every layer; return the largest relative difference.

    Raises UnsupportedModelError for the first layer whose hook does not fire once a forward, or
    whose heads are elsewhere; JuiceError for lack of memory.
    """
    name, layers = type(loaded.model).__name__, loaded.layout.layers
    n_rows = 1 + min(n_heads, loaded.layout.n_heads)
    ids = torch.arange(1, N_TOKENS + 1, device=loaded.device) % loaded.describe().vocabulary_size
    ids = ids.repeat(n_rows, 1)  # [rows, tokens]
    plan = _one_head_a_row(layers, n_rows, loaded.device)
    doubling, fired = _Doubling(name, plan), Counter[int]()
    with (
        refusing(name, f"{name}: its heads cannot be checked"),
        loaded.turn,
        _plain_attention(loaded),
        at_z(layers, lambda layer, _z: fired.update([layer.index])),
    ):
        steered = _attention_outputs(loaded, ids, loaded.hooks.steer(plan))
        doubled = _attention_outputs(loaded, ids, _within(layers, doubling))
    differences: list[float] = []
    for layer, by_hook, by_attention in zip(layers, steered, doubled, strict=True):
        if fired[layer.index] != 2:
            raise UnsupportedModelError(
                f"{name}: the output projection of layer {layer.index} ran {fired[layer.index]} "
                "times in two forwards; expected once a forward"
            )
        if layer.index not in doubling.seen:
            raise UnsupportedModelError(
                f"{name}: the attention of layer {layer.index} does not use a softmax with a "
                "dimension for heads"
            )
        if not by_attention.isfinite().all():
            raise UnsupportedModelError(
                f"{name}: the attention of layer {layer.index} is not finite in "
                f"{loaded.describe().dtype}; load it with --dtype bfloat16 or --dtype float32"
            )
        difference = _relative_difference(by_hook, by_attention)
        if difference is None:
            continue
        if not difference <= TOLERANCE:  # or NaN
            raise UnsupportedModelError(
                f"{name}: steering a head of layer {layer.index} by 1 does not equal doubling it "
                f"in the attention (they differ by {difference:.2g} of the head's effect): its "
                "heads are elsewhere, or are mixed before the projection"
            )
        differences.append(difference)
    if not differences:
        raise UnsupportedModelError(
            f"{name}: no head of any layer makes a difference, so they cannot be located"
        )
    return max(differences)


def _relative_difference(by_hook: torch.Tensor, by_attention: torch.Tensor) -> float | None:
    """Return the largest difference of a row as a share of its head's effect; None without any.

    Both are [rows, tokens, d_model]; row 0 has nothing steered and nothing doubled.
    """
    effects = _largest_by_row(by_attention - by_attention[:1])
    differences = _largest_by_row(by_hook - by_attention)
    if not effects.any() and not differences.any():
        return None  # a pruned layer: neither steering nor doubling does anything
    # A head with next to no effect differs by rounding alone: the clamp allows for it.
    return float((differences / effects.clamp(min=float(effects.max()) * NEXT_TO_NOTHING)).max())


def _largest_by_row(values: torch.Tensor) -> torch.Tensor:
    """Return the largest size in each row, [rows], of values [rows, ...]."""
    return values.abs().flatten(1).amax(1)


def heads_to_check(n_heads: int, n: int) -> list[int]:
    """Return n of a layer's heads, the first two and the last among them."""
    last = n_heads - 1
    heads = [round(i * last / (n - 1)) for i in range(n)] if n > 1 else [last]
    if 3 < n < n_heads:
        heads[1] = 1
    return heads


def _one_head_a_row(
    layers: Sequence[AttentionLayer], n_rows: int, device: torch.device
) -> SteeringPlan:
    """Return the plan that scales a checked head of its own z in every row but the first, by 1."""
    rows = torch.arange(n_rows, device=device)
    coefficients = {}
    for layer in layers:
        coefficients[layer.index] = torch.zeros(n_rows, layer.n_heads, device=device)
        coefficients[layer.index][rows[1:], heads_to_check(layer.n_heads, n_rows - 1)] = 1
    return SteeringPlan(dict.fromkeys(coefficients, rows), coefficients)


def _attention_outputs(loaded: LoadedModel, ids: torch.Tensor, change: Any) -> list[torch.Tensor]:
    """Return the output of each layer's attention, float32 [rows, tokens, d_model].

    In every layer all rows have the inputs of row 0, so that no difference is carried upwards.
    """
    n_rows, outputs = len(ids), list[torch.Tensor]()
    first = torch.zeros(n_rows, dtype=torch.int64, device=ids.device)

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return copy_rows((args, kwargs), n_rows, first)

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple | list) else output).float())

    handles = (
        handle
        for layer in loaded.layout.layers
        for handle in (
            layer.attention.register_forward_pre_hook(in_this_thread(enter), with_kwargs=True),
            layer.attention.register_forward_hook(in_this_thread(leave)),
        )
    )
    with hooked(handles), change:
        loaded.run(input_ids=ids, use_cache=False)
    return outputs


@contextmanager
def _within(layers: Sequence[AttentionLayer], doubling: _Doubling) -> Iterator[None]:
    """Double inside the attention modules only: a router of experts has a softmax too."""

    def inside(layer: AttentionLayer | None) -> Any:
        return in_this_thread(lambda *_: setattr(doubling, "layer", layer))

    handles = (
        handle
        for layer in layers
        for handle in (
            layer.attention.register_forward_pre_hook(inside(layer)),
            layer.attention.register_forward_hook(inside(None)),
        )
    )
    with hooked(handles), doubling:
        yield


@contextmanager
def _plain_attention(loaded: LoadedModel) -> Iterator[None]:
    """Run attention as PyTorch code: a fused kernel hides its inside, but z is the same."""
    config = text_config(loaded.model)
    was = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = was


def require_lens() -> None:
    """Raise UsageError if the extra `lens` is not installed."""
    if find_spec("transformer_lens") is None:
        raise UsageError(
            "--deep compares with TransformerLens; "
            "install it with: pip install 'juice-steering[lens]'"
        )


@torch.inference_mode()
def lens_difference(loaded: LoadedModel, ids: torch.Tensor) -> float | None:
    """Return the largest difference of z from TransformerLens' hook_z, relative to the size of z.

    The input of the output projection of layer l is its `blocks.{l}.attn.hook_z`.

    `ids` is int64 [1, tokens]. Returns None, with a warning, where TransformerLens cannot run the
    model. Its bridge wraps the model's modules in place, so the model cannot generate afterwards.
    Raises UsageError without the extra `lens`.
    """
    require_lens()
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    ours: dict[int, torch.Tensor] = {}

    def keep(layer: AttentionLayer, z: torch.Tensor) -> None:
        ours[layer.index] = z.float()  # [1, tokens, n_heads * d_head]

    with loaded.turn, at_z(loaded.layout.layers, keep):
        loaded.run(input_ids=ids, use_cache=False)
    name = type(loaded.model).__name__
    try:
        bridge = build_bridge_from_module(
            loaded.model, name, hf_config=loaded.model.config, tokenizer=loaded.tokenizer
        )
        _, cache = bridge.run_with_cache(ids)
        theirs = {index: cache[f"blocks.{index}.attn.hook_z"].float() for index in ours}
    except Exception as error:  # it knows fewer architectures than transformers
        warnings.warn(
            f"TransformerLens cannot run {name}, so z is not compared with its own: {error}",
            stacklevel=2,
        )
        return None
    if differing := [index for index, z in ours.items() if theirs[index].numel() != z.numel()]:
        warnings.warn(
            f"z of layer {differing[0]} is not the same size as in TransformerLens",
            stacklevel=2,
        )
        return float("inf")
    return largest(
        float((theirs[index].reshape(z.shape) - z).abs().max() / z.abs().max())
        for index, z in ours.items()
    )
