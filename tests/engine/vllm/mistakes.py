"""Mistakes that would silently steer wrongly, each made on purpose in vLLM's running workers."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from multiprocessing import parent_process
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.core.sched.scheduler import Scheduler

from juice.checks.two_runs import check_vllm
from juice.engine.vllm import gather
from juice.engine.vllm import model as companion
from juice.engine.vllm.arguments import Coefficients
from juice.engine.vllm.patches import SaltingScheduler
from juice.engine.vllm.slots import SteeredState
from juice.engine.vllm.state import CLEAN, OWN, Table
from juice.errors import UnsupportedModelError

Patch, Head = pytest.MonkeyPatch, tuple[int, int, float]
Mistake = Callable[[Patch, Any], None]
WRITE, PLACE = Table.write, Table.place


@contextmanager
def possible() -> Iterator[None]:
    """Let workers that start within take functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        yield


class Workers:
    """vLLM's workers, each in its process.

    Args:
        engine: A running `VllmEngine`, started where mistakes are `possible`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def make(self, mistake: Mistake) -> None:
        """Make a mistake in every worker."""
        self._call(_make, mistake.__name__)

    def undo(self) -> None:
        """Undo it."""
        self._call(_undo)

    def count(self) -> None:
        """Count the tokens that come to each output projection from here on."""
        self._call(_count)

    def most_tokens(self) -> dict[int, int]:
        """Return the most tokens of a step by layer, since this was last asked for."""
        counted: dict[int, int] = self._call(_most_tokens)[0]
        return counted

    def count_shadows(self) -> None:
        """Count how often companions attend from here on, also where steps are compiled."""
        self._call(_count_shadows)

    def n_shadows(self) -> int:
        """Return how often they did on the first rank, since this was last asked for."""
        return int(self._call(_n_shadows)[0])

    def padding_is_told(self) -> set[bool]:
        """Return whether steps told experts which tokens are padding, since this was last asked."""
        told: set[bool] = self._call(_padding_is_told)[0]
        return told

    def lost_in_sleep(self) -> list[str]:
        """Return the tensors of the table that vLLM would not bring back from a deep sleep."""
        lost: list[str] = self._call(_lost_in_sleep)[0]
        return lost

    def replay_whole_steps(self) -> None:
        """Let the models believe that steps are captured as graphs, whole, as on a GPU."""
        self._call(_replay_whole_steps)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._engine._call(self._engine._llm.collective_rpc(function, args=args))


def assert_refused(engine: Any, mistake: Mistake) -> None:
    """Assert that the check refuses a mistake, and nothing once it is undone."""
    workers = Workers(engine)
    workers.make(mistake)
    with pytest.raises(UnsupportedModelError, match="not steered exactly"):
        check_vllm(engine)
    workers.undo()
    engine.preempt().result()  # and forget what was cached by mistake
    check_vllm(engine)


_made = pytest.MonkeyPatch()


def _make(worker: Any, name: str) -> None:
    globals()[name](_made, worker.model_runner.get_model())


def _undo(_worker: Any) -> None:
    _made.undo()


_n_tokens: dict[int, int] = {}
_told: set[bool] = set()


def _count(worker: Any) -> None:
    for layer, projection in worker.model_runner.get_model().companions.projections.items():

        def note(_module: Any, args: tuple[torch.Tensor, ...], layer: int = layer) -> None:
            _n_tokens[layer] = max(_n_tokens.get(layer, 0), args[0].shape[-2])
            _told.add(get_forward_context().is_padding is not None)

        projection.register_forward_pre_hook(note)


def _most_tokens(_worker: Any) -> dict[int, int]:
    counted = dict(_n_tokens)
    _n_tokens.clear()
    return counted


def _padding_is_told(_worker: Any) -> set[bool]:
    told = set(_told)
    _told.clear()
    return told


def _lost_in_sleep(worker: Any) -> list[str]:
    model = worker.model_runner.get_model()
    kept = {buffer.data_ptr() for buffer in model.buffers()}
    tensors = {k: v for k, v in vars(model.table).items() if isinstance(v, torch.Tensor)}
    assert tensors
    return [name for name, tensor in tensors.items() if tensor.data_ptr() not in kept]


_attended: list[Any] = []


def _count_shadows(worker: Any) -> None:
    for module in worker.model_runner.get_model().modules():
        if (shadow := getattr(module, "shadow", None)) is not None:
            impl = shadow.attn.impl

            def forward(*args: Any, attend: Any = impl.forward, **kwargs: Any) -> Any:
                _attended.append(shadow)
                return attend(*args, **kwargs)

            impl.forward = forward


def _n_shadows(_worker: Any) -> int:
    n = len(_attended)
    _attended.clear()
    return n


def _replay_whole_steps(worker: Any) -> None:
    model, config = worker.model_runner.get_model(), copy(worker.vllm_config)
    config.compilation_config = copy(config.compilation_config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    model.vllm_config, model.companions.of_some = config, False


def another_head(patch: Patch, _model: Any) -> None:
    _change_heads(patch, lambda layer, head, value: (layer, (head + 1) % 4, value))


def another_layer(patch: Patch, _model: Any) -> None:
    _change_heads(patch, lambda layer, head, value: ((layer + 1) % 4, head, value))


def another_scale(patch: Patch, _model: Any) -> None:
    _change_heads(patch, lambda layer, head, value: (layer, head, 1.25 * value))


def a_slightly_larger_scale(patch: Patch, _model: Any) -> None:
    """Far below the share that rounding may have elsewhere; float32 has none of it."""
    _change_heads(patch, lambda layer, head, value: (layer, head, 1.01 * value))


def another_sign(patch: Patch, _model: Any) -> None:
    _change_heads(patch, lambda layer, head, value: (layer, head, -value))


def another_scale_that_is_not_a_number(patch: Patch, _model: Any) -> None:
    _change_heads(patch, lambda layer, head, _: (layer, head, math.nan))


def the_last_layer_missing(patch: Patch, _model: Any) -> None:
    _change_heads(patch, lambda layer, head, value: (layer, head, value if layer < 3 else 0.0))


def all_heads_but_the_first_of_a_layer(patch: Patch, _model: Any) -> None:
    _change_heads(patch, lambda layer, head, value: (layer, head, value if head else 0.0))


def another_row(patch: Patch, _model: Any) -> None:
    _change_rows(patch, lambda table, rows, _: (rows + 1) % (table.n_rows + 1))


def no_steering_in_the_last_row(patch: Patch, _model: Any) -> None:
    _change_rows(patch, lambda table, rows, _: rows.where(rows < table.n_rows - 1, table.n_rows))


def the_prompt_alone(patch: Patch, _model: Any) -> None:
    def change(table: Table, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rows if len(positions) > table.n_rows else torch.full_like(rows, table.n_rows)

    _change_rows(patch, change)


def new_tokens_alone(patch: Patch, _model: Any) -> None:
    def change(table: Table, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.full_like(rows, table.n_rows) if len(positions) > table.n_rows else rows

    _change_rows(patch, change)


def tokens_after_the_first_alone(patch: Patch, _model: Any) -> None:
    _change_rows(patch, lambda table, rows, positions: rows.where(positions > 0, table.n_rows))


def rows_that_do_not_move(patch: Patch, _model: Any) -> None:
    patch.setattr(Table, "move", lambda *_: None)


def slots_in_the_order_of_the_batch(patch: Patch, _model: Any) -> None:
    patch.setattr(Table, "place", lambda self, starts, at, _slots: PLACE(self, starts, at))


def slots_that_are_written_a_step_late(patch: Patch, _model: Any) -> None:
    late, write = list[SteeredState](), SteeredState.apply_staged_writes

    def apply(self: SteeredState) -> None:
        staged, self._staged = self._staged, late.pop() if late else {}
        write(self)
        late.append(staged)

    patch.setattr(SteeredState, "apply_staged_writes", apply)


def rows_that_stay_steered(patch: Patch, _model: Any) -> None:
    patch.setattr(Table, "write", lambda self, row, given: given is None or WRITE(self, row, given))


def hooks_that_do_not_fire(patch: Patch, model: Any) -> None:
    for projection in model.companions.projections.values():
        patch.setattr(projection, "_forward_pre_hooks", OrderedDict())


def one_hook_that_does_not_fire(patch: Patch, model: Any) -> None:
    patch.setattr(model.companions.projections[2], "_forward_pre_hooks", OrderedDict())


def its_own_run_as_source(patch: Patch, _model: Any) -> None:
    patch.setattr(companion, "OWN", CLEAN)
    patch.setattr(companion, "CLEAN", OWN)


def companions_in_the_caches_of_their_tokens(patch: Patch, model: Any) -> None:
    for module in model.modules():
        if (shadow := getattr(module, "shadow", None)) is not None:
            patch.setattr(shadow.attn, "kv_cache", module.attn.kv_cache)


def companions_that_are_steered_too(patch: Patch, model: Any) -> None:
    def steering_both(steer: Any) -> Any:
        def both(module: Any, args: Any) -> Any:
            changed = steer(module, args)
            if changed is None or not model.companions.doubled:
                return changed
            z = changed[0]
            n = model.companions.n_of(z.shape[-2])
            twice = torch.cat([z[..., :n, :], z[..., :n, :]], -2)
            return (twice[..., : z.shape[-2], :], *changed[1:])

        return both

    for projection in model.companions.projections.values():
        hooks = projection._forward_pre_hooks
        changed = type(hooks)((key, steering_both(hook)) for key, hook in hooks.items())
        patch.setattr(projection, "_forward_pre_hooks", changed)


def companions_of_other_tokens(patch: Patch, _model: Any) -> None:
    choose = gather.choose
    patch.setattr(gather, "choose", lambda at: choose(at.roll(1)))


def companions_beside_other_requests(patch: Patch, _model: Any) -> None:
    part = gather.Gathering._part
    patch.setattr(
        gather.Gathering,
        "_part",
        lambda self, name, whole, requests, *others: part(
            self, name, whole, [(i + 1) % len(whole.seq_lens) for i in requests], *others
        ),
    )


def a_cache_that_knows_tokens_alone() -> None:
    """Made in every process that vLLM starts."""
    if parent_process() is not None:
        SaltingScheduler.add_request = Scheduler.add_request


def steered_to_the_end(patch: Patch, model: Any) -> None:
    _change_coefficients(patch, lambda given: replace(given, last_position=None))


def an_end_that_is_one_late(patch: Patch, model: Any) -> None:
    def later(given: Coefficients) -> Coefficients:
        last = given.last_position
        return replace(given, last_position=None if last is None else last + 1)

    _change_coefficients(patch, later)


def one_strength(patch: Patch, model: Any) -> None:
    _change_coefficients(patch, lambda given: replace(given, schedule=()))


def a_schedule_that_counts_from_the_first_token(patch: Patch, model: Any) -> None:
    _change_coefficients(patch, lambda given: replace(given, n_prompt=0))


def a_schedule_that_is_one_late(patch: Patch, model: Any) -> None:
    _change_coefficients(patch, lambda given: replace(given, n_prompt=given.n_prompt + 1))


def factors_of_another_row(patch: Patch, model: Any) -> None:
    def place(self: Table, starts: Any, positions: torch.Tensor, *given: Any) -> None:
        PLACE(self, starts, positions, *given)
        factors = self.factor_of_token[: len(positions)]
        factors.copy_(factors.roll(1))

    patch.setattr(Table, "place", place)


def the_heads_of_the_first_rank(patch: Patch, model: Any) -> None:
    patch.setattr(model.companions, "_rank", 0)


ON_V2 = (slots_in_the_order_of_the_batch, slots_that_are_written_a_step_late)
ON_ONE_DEVICE = (
    another_head,
    another_layer,
    another_scale,
    another_scale_that_is_not_a_number,
    another_sign,
    the_last_layer_missing,
    all_heads_but_the_first_of_a_layer,
    another_row,
    no_steering_in_the_last_row,
    the_prompt_alone,
    new_tokens_alone,
    steered_to_the_end,
    an_end_that_is_one_late,
    one_strength,
    a_schedule_that_counts_from_the_first_token,
    a_schedule_that_is_one_late,
    factors_of_another_row,
    tokens_after_the_first_alone,
    *(ON_V2 if envs.VLLM_USE_V2_MODEL_RUNNER else (rows_that_do_not_move,)),
    rows_that_stay_steered,
    hooks_that_do_not_fire,
    one_hook_that_does_not_fire,
    its_own_run_as_source,
    companions_in_the_caches_of_their_tokens,
    companions_that_are_steered_too,
    companions_of_other_tokens,
    companions_beside_other_requests,
)


def _change_heads(patch: Patch, change: Callable[[int, int, float], Head]) -> None:
    """Let every row be written with other layers, heads or coefficients."""
    _change_coefficients(
        patch, lambda given: replace(given, heads=tuple(change(*head) for head in given.heads))
    )


def _change_coefficients(patch: Patch, change: Callable[[Coefficients], Coefficients]) -> None:
    """Let every steered row be written otherwise."""

    def write(self: Table, row: int, given: Coefficients | None) -> None:
        WRITE(self, row, None if given is None else change(given))

    patch.setattr(Table, "write", write)


def _change_rows(patch: Patch, change: Callable[[Table, torch.Tensor, torch.Tensor], Any]) -> None:
    """Let every token be given another row."""

    def place(self: Table, starts: Any, positions: torch.Tensor, *given: Any) -> None:
        PLACE(self, starts, positions, *given)
        rows = self.row_of_token[: len(positions)]
        rows.copy_(change(self, rows.clone(), positions))

    patch.setattr(Table, "place", place)
