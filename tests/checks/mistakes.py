"""Mistakes of our engine that would silently steer wrongly, each made on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from juice.engine.own.cache import SlotCache
from juice.engine.own.loop import Loop
from juice.engine.own.rows import RowList
from juice.engine.own.thread import BatchingEngine
from juice.engine.steer import Steering
from juice.model import steering_hooks as hooks
from juice.model.masks import AttentionPattern
from juice.model.steering_hooks import ModelHooks, SteeringPlan

Patch = pytest.MonkeyPatch
Change = Callable[[SteeringPlan], SteeringPlan]
STEER, ADD_SCALED, COPY_ROWS = ModelHooks.steer, hooks.add_scaled, hooks.copy_rows
WINDOW, MASKS, ROWS_OF = BatchingEngine.companion_layers, AttentionPattern.masks, Loop.rows_of
COPY, SWAP = SlotCache.copy, SlotCache.swap


def _change_plan(patch: Patch, change: Change) -> None:
    patch.setattr(ModelHooks, "steer", lambda steering, plan: STEER(steering, change(plan)))


def _change_coefficients(patch: Patch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the coefficients of every layer, [rows, n_heads]."""
    _change_plan(
        patch,
        lambda plan: replace(
            plan,
            coefficients={
                layer: change(coefficients) for layer, coefficients in plan.coefficients.items()
            },
        ),
    )


def _change_window(patch: Patch, first: int, last: int) -> None:
    def wrong(engine: BatchingEngine, steering: Steering) -> range:
        window = WINDOW(engine, steering)
        return range(window.start + first, window.stop + last) if len(window) > 1 else window

    patch.setattr(BatchingEngine, "companion_layers", wrong)


def the_own_row_as_source(patch: Patch) -> None:
    _change_plan(
        patch,
        lambda plan: replace(
            plan,
            sources={layer: torch.arange(len(source)) for layer, source in plan.sources.items()},
        ),
    )


def the_last_layer_missing(patch: Patch) -> None:
    def change(plan: SteeringPlan) -> SteeringPlan:
        coefficients = {layer: each.clone() for layer, each in sorted(plan.coefficients.items())}
        for row in range(min(map(len, coefficients.values()), default=0)):
            if steered := [
                layer for layer, coefficient in coefficients.items() if coefficient[row].any()
            ]:
                coefficients[steered[-1]][row] = 0
        return replace(plan, coefficients=coefficients)

    _change_plan(patch, change)


def a_companion_that_enters_late(patch: Patch) -> None:
    _change_window(patch, 1, 0)


def a_companion_that_ends_early(patch: Patch) -> None:
    _change_window(patch, 0, -1)


def the_masks_of_another_companion(patch: Patch) -> None:
    def wrong(value: Any, n_rows: int, origins: torch.Tensor, _copies: Any) -> Any:
        rolled = torch.cat([origins[:n_rows], origins[n_rows:].roll(1)])
        return COPY_ROWS(value, n_rows, rolled)

    patch.setattr(hooks, "copy_rows", wrong)


def another_scale(patch: Patch) -> None:
    _change_coefficients(patch, lambda table: 1.25 * table)


def the_prompt_alone(patch: Patch) -> None:
    patch.setattr(
        hooks,
        "add_scaled",
        lambda z, *scaled: z if z.shape[1] == 1 else ADD_SCALED(z, *scaled),
    )


def companions_that_do_not_move(patch: Patch) -> None:
    def wrong(cache: SlotCache, *places: Any, is_main: bool) -> None:
        if is_main:
            SWAP(cache, *places, is_main=True)

    patch.setattr(SlotCache, "swap", wrong)


def heads_from_the_ninth_dropped(patch: Patch) -> None:
    _change_coefficients(patch, lambda table: table * (torch.arange(table.shape[1]) < 8))


def heads_permuted_but_the_first(patch: Patch) -> None:
    _change_coefficients(patch, lambda table: torch.cat([table[:, :1], table[:, 1:].roll(1, 1)], 1))


def no_steering_above_eight_rows(patch: Patch) -> None:
    _change_coefficients(patch, lambda table: table * (torch.arange(len(table)) < 8)[:, None])


def no_steering(patch: Patch) -> None:
    _change_plan(patch, lambda _plan: SteeringPlan({}, {}))


def the_next_head(patch: Patch) -> None:
    _change_coefficients(patch, lambda table: table.roll(1, 1))


def masks_off_by_one(patch: Patch) -> None:
    patch.setattr(
        AttentionPattern,
        "masks",
        lambda pattern, positions, *more: MASKS(pattern, positions + 1, *more),
    )


def a_stale_layout(patch: Patch) -> None:
    """Rows that decode keep the layout of those before them, if there are as many."""
    layouts: dict[tuple[Loop, int], Any] = {}

    def wrong(loop: Loop, sequences: list[Any]) -> Any:
        right = ROWS_OF(loop, sequences)
        if sequences[0].is_prefilling:
            return right
        kept = layouts.setdefault((loop, len(sequences)), right)
        return replace(kept, sequences=right.sequences)

    patch.setattr(Loop, "rows_of", wrong)


def slots_copied_short(patch: Patch) -> None:
    def wrong(cache: SlotCache, layers: Any, source: int, to: int, n: int, **kind: Any) -> None:
        COPY(cache, layers, source, to, n - 1, **kind)

    patch.setattr(SlotCache, "copy", wrong)


def a_row_list_that_forgets_who_decodes(patch: Patch) -> None:
    def wrong(row_list: RowList, sequence: Any) -> None:
        row_list.n_decoding += sequence in row_list.rows

    patch.setattr(RowList, "start_decoding", wrong)


MISTAKES = {
    name: each
    for name, each in list(globals().items())
    if callable(each) and getattr(each, "__module__", "") == __name__ and not name.startswith("_")
}
