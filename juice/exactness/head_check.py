"""The check that the heads are where the resolver found them: steering by 1 doubles a head.

A sum over heads does not show how z splits into them. The attention does: its probabilities, or its
outputs, have a dimension for the heads, [rows, n_heads, ...], before anything is flattened. So a
few rows with the same tokens run twice. The first time each row has its own head steered by 1,
through the hooks that steer requests; the second time, without hooks, that head's probabilities are
doubled inside the attention. Both must make the same difference, and not zero, to what the
attention returns in every layer. They do not for heads read from the wrong columns, key-value heads
taken for heads, a bias that is scaled along, or a projection that bypasses its hook.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from juice.errors import JuiceError, UnsupportedModelError
from juice.model.hooks import hooked
from juice.model.layout import AttentionLayer, text_config
from juice.model.loaded import LoadedModel
from juice.model.row_routing import copy_rows
from juice.model.steering_hooks import SteeringPlan

N_TOKENS = 3
# Doubling is exact in floating point; only the order of sums differs.
TOLERANCE = 1e-2
NEXT_TO_NOTHING = 1e-3
READS = {"softmax", "scaled_dot_product_attention"}  # where PyTorch code has a dimension for heads


class _Doubling(TorchFunctionMode):
    """Doubles checked head i in row i + 1 of an attention's probabilities or fused output."""

    def __init__(self, name: str, n_rows: int) -> None:
        self.layer: AttentionLayer | None = None
        self.seen: set[int] = set()
        self._name, self._n_rows = name, n_rows
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.layer is None or getattr(func, "__name__", "") not in READS:
            return result
        return self._doubled(result, self.layer)

    def _doubled(self, read: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        by_head = read
        if read.dim() == 3:  # [rows * heads, tokens, ...]
            by_head = read.view(self._n_rows, -1, *read.shape[1:])
        elif read.dim() == 5:  # [rows, KV heads, heads of each, tokens, ...]
            by_head = read.flatten(1, 2)
        if by_head.dim() != 4 or by_head.shape[1] != layer.n_heads:
            raise UnsupportedModelError(
                f"{self._name}: the attention of layer {layer.index} has the shape "
                f"{list(read.shape)}; expected [rows, {layer.n_heads} heads, tokens, ...]"
            )
        self.seen.add(layer.index)
        doubled = by_head.clone()
        for row, head in enumerate(_heads_of(layer, self._n_rows - 1), start=1):
            doubled[row, head] *= 2
        return doubled.view(read.shape)


@torch.inference_mode()
def check_heads(loaded: LoadedModel, n_heads: int = 4) -> float:
    """Check `n_heads` heads, spread out, in every layer; return the largest relative difference.

    Raises UnsupportedModelError for the first layer whose hook does not fire once a forward, or
    whose heads are elsewhere; JuiceError for lack of memory.
    """
    name, layers = type(loaded.model).__name__, loaded.layout.layers
    rows = 1 + min(n_heads, loaded.layout.n_heads)
    ids = (
        torch.arange(1, N_TOKENS + 1, device=loaded.device)[None].repeat(rows, 1)
        % loaded.vocabulary_size
    )
    fired: Counter[nn.Module] = Counter()

    def count(projection: nn.Module, *_: Any) -> None:
        fired[projection] += 1

    try:
        with (
            loaded.turn,
            _plain_attention(loaded),
            hooked(layer.projection.register_forward_hook(count) for layer in layers),
        ):
            steered = _attention_outputs(
                loaded,
                ids,
                loaded.steering_hooks.apply(_one_head_a_row(layers, rows, loaded.device)),
            )
            doubling = _Doubling(name, rows)
            doubled = _attention_outputs(loaded, ids, _within(layers, doubling))
    except UnsupportedModelError:
        raise
    except torch.OutOfMemoryError as error:
        raise JuiceError(
            f"there is not enough memory to check {name}; choose another --device or --device-map, "
            "or a smaller --dtype"
        ) from error
    except Exception as error:  # whatever a model raises at inputs that it does not expect
        raise UnsupportedModelError(f"{name}: its heads cannot be checked: {error!r}") from error
    worst, is_moved = 0.0, False
    for layer, by_hook, by_attention in zip(layers, steered, doubled, strict=True):
        if fired[layer.projection] != 2:
            raise UnsupportedModelError(
                f"{name}: the output projection of layer {layer.index} ran "
                f"{fired[layer.projection]} times "
                "in two forwards; expected once a forward"
            )
        if layer.index not in doubling.seen:
            raise UnsupportedModelError(
                f"{name}: the attention of layer {layer.index} does not use a softmax with a "
                "dimension for heads"
            )
        # A head with next to no effect differs by rounding alone: the clamp below allows for it.
        effects, differences = (
            _largest_by_row(by_attention - by_attention[:1]),
            _largest_by_row(by_hook - by_attention),
        )
        if not effects.any() and not differences.any():
            continue  # a pruned layer: neither steering nor doubling does anything
        is_moved = True
        difference = float(
            (differences / effects.clamp(min=float(effects.max()) * NEXT_TO_NOTHING)).max()
        )
        if not difference <= TOLERANCE:  # or NaN
            raise UnsupportedModelError(
                f"{name}: steering a head of layer {layer.index} by 1 does not equal doubling it "
                f"in the attention (they differ by {difference:.2g} of the head's effect): its "
                "heads are elsewhere, or are mixed before the projection"
            )
        worst = max(worst, difference)
    if not is_moved:
        raise UnsupportedModelError(
            f"{name}: no head of any layer makes a difference, so they cannot be located"
        )
    return worst


def _largest_by_row(values: torch.Tensor) -> torch.Tensor:
    return values.abs().flatten(1).amax(1)


def _heads_of(layer: AttentionLayer, n: int) -> list[int]:
    """Return the n heads of a layer to check, the first two and the last among them."""
    last = layer.n_heads - 1
    spread = [round(i * last / (n - 1)) for i in range(n)] if n > 1 else [last]
    return (
        [min(1, last) if n > 3 and i == 1 else head for i, head in enumerate(spread)]
        if n < layer.n_heads
        else spread
    )


def _one_head_a_row(
    layers: Sequence[AttentionLayer], rows: int, device: torch.device
) -> SteeringPlan:
    own = torch.arange(rows, device=device)
    coefficients = {}
    for layer in layers:
        table = torch.zeros(rows, layer.n_heads, device=device)
        for row, head in enumerate(_heads_of(layer, rows - 1), start=1):
            table[row, head] = 1
        coefficients[layer.index] = table
    return SteeringPlan(dict.fromkeys(coefficients, own), coefficients)


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

    attentions = [layer.attention for layer in loaded.layout.layers]
    with (
        hooked(own.register_forward_pre_hook(enter, with_kwargs=True) for own in attentions),
        hooked(own.register_forward_hook(leave) for own in attentions),
        change,
    ):
        loaded.run(input_ids=ids, use_cache=False)
    return outputs


@contextmanager
def _within(layers: Sequence[AttentionLayer], doubling: _Doubling) -> Iterator[None]:
    """Double inside the attention modules only: a router of experts has a softmax too."""

    def inside(layer: AttentionLayer | None) -> Any:
        return lambda *_: setattr(doubling, "layer", layer)

    with (
        hooked(own.attention.register_forward_pre_hook(inside(own)) for own in layers),
        hooked(own.attention.register_forward_hook(inside(None)) for own in layers),
        doubling,
    ):
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
