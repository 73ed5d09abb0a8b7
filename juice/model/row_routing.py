"""Which rows go through which layer: rows enter and leave the batch between decoder layers.

A model is called with n rows. Layer l runs those n and, after them, companions: copies of some of
these rows that fork off at one layer and are dropped at another. Permanent pre-hooks on the decoder
layers, which do nothing without a plan, assemble each layer's rows and give every companion the
masks and positions of the row it copies. The modules are transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


class RowRouting:
    """The hooks of one model; `route` sets the rows of every layer for the forwards within it."""

    def __init__(self, layout: Layout) -> None:
        self._plan: Sequence[LayerRows] | None = None
        self._n_rows = 0
        self.handles = [
            layer.layer.register_forward_pre_hook(self._hook(layer.index), with_kwargs=True)
            for layer in layout.layers
        ]
        self.handles.append(layout.layers[-1].layer.register_forward_hook(self._leave))

    @contextmanager
    def route(self, plan: Sequence[LayerRows], n_rows: int) -> Iterator[None]:
        """Route the rows of every forward within; the model is called with n_rows."""
        self._plan, self._n_rows = plan, n_rows
        try:
            yield
        finally:
            self._plan = None

    def _hook(self, index: int) -> Any:
        def enter(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, Any] | None:
            if self._plan is None:
                return None
            rows = self._plan[index]
            if rows.taken is None and rows.origins is None:
                return None
            hidden = args[0] if args else kwargs["hidden_states"]
            if rows.taken is not None:
                hidden = hidden[rows.taken.to(hidden.device)]
            others = (
                args[1:],
                {name: value for name, value in kwargs.items() if name != "hidden_states"},
            )
            rest, named = (
                others if rows.origins is None else copy_rows(others, self._n_rows, rows.origins)
            )
            return ((hidden, *rest), named) if args else (rest, {**named, "hidden_states": hidden})

        return enter

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Keep only the call's own rows after the last layer."""
        if self._plan is None or self._plan[-1].origins is None:
            return output
        return (
            (output[0][: self._n_rows], *output[1:])
            if isinstance(output, tuple)
            else output[: self._n_rows]
        )


def copy_rows(value: Any, n_rows: int, origins: torch.Tensor) -> Any:
    """Gather the rows `origins` of every tensor in `value` that has n_rows rows.

    Values that all rows share are returned unchanged.
    """
    if isinstance(value, torch.Tensor):
        return (
            value[origins.to(value.device)]
            if value.dim() > 1 and n_rows > 1 and value.shape[0] == n_rows
            else value
        )
    if isinstance(value, tuple | list):
        return type(value)(copy_rows(item, n_rows, origins) for item in value)
    if type(value) is dict:
        return {
            key: BY_NAME.get(key, copy_rows)(item, n_rows, origins) for key, item in value.items()
        }
    return value


def _copy_alibi(alibi: Any, n_rows: int, origins: torch.Tensor) -> Any:
    """Gather the rows of BLOOM's biases, [rows * n_heads, 1, keys]."""
    if isinstance(alibi, torch.Tensor) and alibi.dim() == 3:
        return alibi.view(n_rows, -1, *alibi.shape[1:])[origins].flatten(0, 1)
    return copy_rows(alibi, n_rows, origins)


# Arguments whose shape alone would mislead: MPT's biases, [n_heads, 1, keys], are the same for all
# rows.
BY_NAME: dict[str, Callable[[Any, int, torch.Tensor], Any]] = {
    "alibi": _copy_alibi,
    "position_bias": lambda shared, _n_rows, _origins: shared,
}
