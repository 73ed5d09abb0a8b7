"""The hooks of a model: rows enter and leave, z <- z + c z[source], and logits are kept.

    layer l      takes its rows: those of the call and, after them, companions, which are copies of
                 some of these that fork off at one layer and are dropped at another
    z of l       row r gets, at all positions t or at those that the plan names,
                 z[r, t, h] + coefficient[l][r, h] * z[source[l][r], t, h], with z as it was before
    vocabulary   sees the positions whose logits are kept, and no others

A steered row names its clean row as source: that is the dual run. A row may be its own source: that
is how a single run scales itself. The modules are transformers' own.

`ModelHooks` are there from loading on. They act on the forwards of the thread that has set them,
and without that the model is unmodified: a model may belong to somebody who calls it in another
thread while the engine runs. `hooked` and what follows it are there for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident, local
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from juice.errors import UnsupportedModelError
from juice.formula import add_scaled
from juice.model.layout import AttentionLayer, Layout


@dataclass(frozen=True, eq=False)
class LayerRows:
    """The rows of one layer.

    `taken[i]` is the row of the layer below that row i continues (None: the same rows), and
    `origins[i]` the row of the call that it is or copies (None: the call's own rows). Both are
    int64 [rows].
    """

    taken: torch.Tensor | None
    origins: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class SteeringPlan:
    """The addends of one forward, by layer, for the layers that steer.

    `sources` are int64 [rows], `coefficients` float32 [rows, n_heads]. `factors` multiply them at
    each token of the first rows, float32 [rows of the call, pos]; None: by 1. Rows after these have
    no coefficients.
    """

    sources: Mapping[int, torch.Tensor]
    coefficients: Mapping[int, torch.Tensor]
    factors: torch.Tensor | None = None

    def by_token(self, layer: int) -> torch.Tensor:
        """Return a layer's coefficients, float32 [rows, pos, n_heads], or [rows, 1, n_heads]."""
        coefficients = self.coefficients[layer][:, None]
        if self.factors is None:
            return coefficients
        n_companions = len(coefficients) - len(self.factors)
        return coefficients * nn.functional.pad(self.factors, (0, 0, 0, n_companions))[..., None]


# What was gathered in a forward, by the tensor and the rows: layers share masks, cosines and sines.
# The tensor is kept, so that no other can have its id.
Copies = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]


class _Here(local):
    """The orders that hooks follow in the forwards of one thread."""

    rows: Sequence[LayerRows] | None = None
    n_rows = 0
    plan: SteeringPlan | None = None
    steered: frozenset[int] = frozenset()
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    length = 0
    copies: Copies
    on_layer: Callable[[], object] | None = None


class ModelHooks:
    """The hooks of one model; what a `with` block sets holds for this thread's forwards within."""

    def __init__(self, layout: Layout) -> None:
        self._here = _Here()
        self._handles = [layout.output.register_forward_pre_hook(self._keep)]
        for layer in layout.layers:
            self._handles += [
                layer.layer.register_forward_pre_hook(self._enter(layer.index), with_kwargs=True),
                layer.projection.register_forward_pre_hook(self._steer(layer.index)),
            ]
        self._handles.append(layout.layers[-1].layer.register_forward_hook(self._leave))

    def remove(self) -> None:
        """Remove them all."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def _ordered(self, **orders: Any) -> Iterator[_Here]:
        """Set orders for this thread; at the end, those of the class hold again: none."""
        here = vars(self._here)
        here.update(orders)
        try:
            yield self._here
        finally:
            for name in orders:
                here.pop(name, None)

    def route(self, rows: Sequence[LayerRows], n_rows: int) -> AbstractContextManager[object]:
        """Route rows through the layers, which have these; the model is called with n_rows."""
        return self._ordered(rows=rows, n_rows=n_rows, copies={})

    @contextmanager
    def steer(self, plan: SteeringPlan) -> Iterator[None]:
        """Steer; raise RuntimeError at the end for a layer whose hook did not fire."""
        with self._ordered(plan=plan, steered=frozenset()) as here:
            yield
            if missed := plan.coefficients.keys() - here.steered:
                raise RuntimeError(
                    f"steering did not reach layers {sorted(missed)}: "
                    "their output projections were bypassed"
                )

    def keep_logits(
        self, rows: torch.Tensor, positions: torch.Tensor, length: int
    ) -> AbstractContextManager[object]:
        """Project only position `positions[i]` of row `rows[i]`: logits [kept, 1, vocabulary].

        Both are int64 [kept]; each row of the batch has `length` positions. A vocabulary has up to
        256,000 entries: projecting all of a prompt would cost more than the rest of its prefill.
        """
        return self._ordered(kept=(rows, positions), length=length)

    def at_layers(self, on_layer: Callable[[], object]) -> AbstractContextManager[object]:
        """Call `on_layer` when a layer begins, and when the last one has ended."""
        return self._ordered(on_layer=on_layer)

    def _enter(self, index: int) -> Any:
        """Assemble a layer's rows; companions get the masks and positions of what they copy."""

        def enter(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, Any] | None:
            here = self._here
            if here.on_layer is not None:
                here.on_layer()
            if here.rows is None:
                return None
            taken, origins = here.rows[index].taken, here.rows[index].origins
            if taken is None and origins is None:
                return None
            hidden = args[0] if args else kwargs["hidden_states"]  # [rows below, pos, d_model]
            if taken is not None:
                hidden = hidden[taken.to(hidden.device)]
            rest = args[1:]
            named = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            if origins is not None:
                rest, named = copy_rows((rest, named), here.n_rows, origins, here.copies)
            return ((hidden, *rest), named) if args else (rest, {**named, "hidden_states": hidden})

        return enter

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Keep only the call's own rows after the last layer."""
        here = self._here
        if here.on_layer is not None:
            here.on_layer()
        rows, n_rows = here.rows, here.n_rows
        if rows is None or rows[-1].origins is None:
            return output
        return (output[0][:n_rows], *output[1:]) if isinstance(output, tuple) else output[:n_rows]

    def _steer(self, index: int) -> Any:
        def steer(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            plan = self._here.plan
            if plan is None or index not in plan.coefficients:
                return None
            self._here.steered |= {index}
            z = args[0]  # [rows, pos, n_heads * d_head]
            source = z[plan.sources[index].to(z.device)]
            return (add_scaled(z, source, plan.by_token(index)), *args[1:])

        return steer

    def _keep(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._here.kept is None:
            return None
        rows, positions = self._here.kept
        hidden = args[0]
        # Probes add rows to those that the model was called with, and some models restore the
        # shape of the call.
        by_row = hidden.reshape(-1, self._here.length, hidden.shape[-1])
        return (by_row[rows.to(by_row.device), positions.to(by_row.device)].unsqueeze(1), *args[1:])


def copy_rows(value: Any, n_rows: int, origins: torch.Tensor, copies: Copies | None = None) -> Any:
    """Gather the rows `origins`, int64 [rows], of every tensor in `value` that has n_rows rows.

    Values that all rows share are returned unchanged. `copies` are not gathered again.
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


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end, and if not all can be registered."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield


class _Worker(local):
    """The thread that this one works for; None: itself."""

    thread: int | None = None


_worker = _Worker()


def this_thread() -> int:
    """Return the thread that runs this, or that for which it is run."""
    return _worker.thread or get_ident()


@contextmanager
def working_for(thread: int) -> Iterator[None]:
    """Let hooks of another thread act here, such as where derivatives are computed for it."""
    before, _worker.thread = _worker.thread, thread
    try:
        yield
    finally:
        _worker.thread = before


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that acts on the calls of this thread alone, from its registration on."""
    thread = this_thread()

    def act(*args: Any) -> Any:
        return hook(*args) if this_thread() == thread else None

    return act


def at_z(
    layers: Iterable[AttentionLayer],
    act: Callable[[AttentionLayer, torch.Tensor], torch.Tensor | None],
) -> AbstractContextManager[None]:
    """Call act(layer, z) in front of each layer's output projection, while within.

    z is [rows, pos, n_heads * d_head]; what `act` returns, if anything, takes its place.
    """

    def hook(layer: AttentionLayer) -> Any:
        def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            changed = act(layer, args[0])
            return None if changed is None else (changed, *args[1:])

        return before

    return hooked(
        layer.projection.register_forward_pre_hook(in_this_thread(hook(layer))) for layer in layers
    )


Component = Literal["attention", "mlp"]


def knocked_out(
    layer: AttentionLayer, components: Collection[Component]
) -> AbstractContextManager[None]:
    """Zero what components of a layer add to the residual stream, while within; see `mlp_of`."""
    modules = [layer.attention if c == "attention" else mlp_of(layer) for c in components]
    return hooked(module.register_forward_hook(in_this_thread(_zero)) for module in modules)


def mlp_of(layer: AttentionLayer) -> nn.Module:
    """Return a layer's MLP: its last child outside the attention with a matrix of its own.

    Raises UnsupportedModelError where there is none.
    """
    attention = set(layer.attention.modules())
    others = [child for child in layer.layer.children() if not attention & set(child.modules())]
    with_matrix = [child for child in others if any(p.dim() > 1 for p in child.parameters())]
    if not with_matrix:
        raise UnsupportedModelError(
            f"layer {layer.index} has no MLP next to its attention; "
            "leave out the analysis knock_outs"
        )
    return with_matrix[-1]


def _zero(_module: nn.Module, args: Any, output: Any) -> Any:
    """Return the output, [rows, pos, d_model] or a tuple with it first, without what was added."""
    added, *others = output if isinstance(output, tuple) else (output,)
    # BLOOM and MPT pass the residual stream to the module, which adds it.
    passed = args[1] if len(args) > 1 else None
    is_residual = isinstance(passed, torch.Tensor) and passed.shape == added.shape
    residual = passed if is_residual else added * 0
    return (residual, *others) if isinstance(output, tuple) else residual
