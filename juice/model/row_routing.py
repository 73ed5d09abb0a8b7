"""Which rows go through which layer: rows enter and leave the batch between decoder layers.

A model is called with n rows. Layer l runs those n and, after them, companions: copies of some of
these rows that fork off at one layer and are dropped at another. Permanent pre-hooks on the decoder
layers, which do nothing without a plan, assemble each layer's rows and give every companion the
masks and positions of the row it copies. A plan is that of one thread. The modules are
transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Any

import torch
from torch import nn

from juice.model.layout import Layout


@dataclass(frozen=True, eq=False)
class LayerRows:
    """The rows of one layer.

    `taken[i]` is the row of the layer below that row i continues (None: the same rows), and
    `origins[i]` the row of the call that it is or copies (None: the call's own rows). Both are
    int64 [rows].
    """

    taken: torch.Tensor | None
    origins: torch.Tensor | None


# What was gathered in a forward, by the tensor and the rows: layers share masks, cosines and sines.
# The tensor is kept, so that no other can have its id.
Copies = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]


class _Here(local):
    """The rows of the calls of one thread."""

    plan: Sequence[LayerRows] | None = None
    n_rows = 0

    def __init__(self) -> None:
        self.copies: Copies = {}


class RowRouting:
    """The hooks of one model; `route` sets the rows of every layer for the forwards within it."""

    def __init__(self, layout: Layout) -> None:
        self._here = _Here()
        self.handles = [
            layer.layer.register_forward_pre_hook(self._hook(layer.index), with_kwargs=True)
            for layer in layout.layers
        ]
        self.handles.append(layout.layers[-1].layer.register_forward_hook(self._leave))

    @contextmanager
    def route(self, plan: Sequence[LayerRows], n_rows: int) -> Iterator[None]:
        """Route the rows of this thread's forwards within; the model is called with n_rows."""
        here = self._here
        here.plan, here.n_rows = plan, n_rows
        try:
            yield
        finally:
            here.plan = None
            here.copies.clear()

    def _hook(self, index: int) -> Any:
        def enter(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, Any] | None:
            plan, n_rows = self._here.plan, self._here.n_rows
            if plan is None:
                return None
            rows = plan[index]
            if rows.taken is None and rows.origins is None:
                return None
            hidden = args[0] if args else kwargs["hidden_states"]
            if rows.taken is not None:
                hidden = hidden[rows.taken.to(hidden.device)]
            others = (
                args[1:],
                {name: value for name, value in kwargs.items() if name != "hidden_states"},
            )
            if rows.origins is not None:
                others = copy_rows(others, n_rows, rows.origins, self._here.copies)
            rest, named = others
            return ((hidden, *rest), named) if args else (rest, {**named, "hidden_states": hidden})

        return enter

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Keep only the call's own rows after the last layer."""
        plan, n_rows = self._here.plan, self._here.n_rows
        if plan is None or plan[-1].origins is None:
            return output
        return (output[0][:n_rows], *output[1:]) if isinstance(output, tuple) else output[:n_rows]


def copy_rows(value: Any, n_rows: int, origins: torch.Tensor, copies: Copies | None = None) -> Any:
    """Gather the rows `origins` of every tensor in `value` that has n_rows rows.

    Values that all rows share are returned unchanged.

    Args:
        value: A tensor, or a tuple, list or dict of values.
        n_rows: The rows of the call.
        origins: The rows to gather, int64 [rows].
        copies: What was gathered before, and is not gathered again.
    """
    if isinstance(value, torch.Tensor):
        if value.dim() <= 1 or n_rows <= 1 or value.shape[0] != n_rows:
            return value
        copies, key = {} if copies is None else copies, (id(value), id(origins))
        if key not in copies:
            copies[key] = value, value[origins.to(value.device)]
        return copies[key][1]
    if isinstance(value, tuple | list):
        return type(value)(copy_rows(item, n_rows, origins, copies) for item in value)
    if type(value) is dict:
        return {
            key: BY_NAME.get(key, copy_rows)(item, n_rows, origins, copies)
            for key, item in value.items()
        }
    return value


def _copy_alibi(alibi: Any, n_rows: int, origins: torch.Tensor, copies: Copies | None) -> Any:
    """Gather the rows of BLOOM's biases, [rows * n_heads, 1, keys]."""
    if isinstance(alibi, torch.Tensor) and alibi.dim() == 3:
        return alibi.view(n_rows, -1, *alibi.shape[1:])[origins].flatten(0, 1)
    return copy_rows(alibi, n_rows, origins, copies)


# Arguments whose shape alone would mislead: MPT's biases, [n_heads, 1, keys], are the same for all
# rows.
BY_NAME: dict[str, Callable[[Any, int, torch.Tensor, Copies | None], Any]] = {
    "alibi": _copy_alibi,
    "position_bias": lambda shared, _n_rows, _origins, _copies: shared,
}
