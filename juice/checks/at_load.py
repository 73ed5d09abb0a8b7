"""The check at every load of our own engine: it is exact in the fastest mode that is.

A small batch in which every kind of mistake shows is held against the two runs. More than eight
rows run at once, steered and not, in every order; rows join as others leave, a long prompt is
prefilled in chunks beside short ones, and prompts, answers and windows differ in length. Every head
of a steered layer has a coefficient of its own. Some requests steer two layers with the whole model
between them, some two neighbours, some three layers.

The log-probabilities differ from the two runs' for an architecture that ignores the cache, the
masks or the positions it is given, that mixes rows, or that rows cannot enter between layers.

Sliding windows are longer than any prompt that a load has time for, so for the check the model gets
sliding windows of three tokens.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from random import Random

import torch
from torch import nn

from juice.checks.two_runs import (
    LEAST_SCALE,
    N_ROUNDED,
    Agreement,
    agreement,
    defined_by,
    refusing,
    requests_of,
    rounding_of,
    spread,
    steering_by,
)
from juice.engine.load_options import Limits
from juice.engine.own.batch import Mode
from juice.engine.own.thread import BatchingEngine
from juice.engine.request import MAX_TOP_LOGPROBS, Request
from juice.engine.steer import Steering, unsteered
from juice.errors import JuiceError, UnsupportedModelError
from juice.model.loaded import LoadedModel

# Of more weights than these, a prompt of a few tokens is worth several threads.
N_SMALL = 50_000_000
# Fastest first.
MODES = (Mode(), Mode(full_rows=True), Mode(own_masks=True), Mode(full_rows=True, own_masks=True))
SLIDING_WINDOW = 3
# The memory is as good as unlimited: a few tokens always fit.
LIMITS = Limits(max_batch=11, max_prefill_tokens=32, kv_memory_bytes=1 << 50)
# The tokens of each prompt and of its answer; the requests of UNSTEERED are not steered. The first
# answers are so long that eleven rows decode together.
LENGTHS = (
    (12, 5), (3, 5), (2, 6), (5, 5), (4, 5), (7, 5), (2, 5), (6, 5), (3, 6), (5, 5), (2, 5),
    (4, 2), (9, 3), (3, 2),
)  # fmt: skip
UNSTEERED = frozenset({1, 6, 9})
# A forward of other shapes rounds differently: more rows, and tokens after those that count. The
# first differ most.
OTHER_SHAPES = ((11, 9), (5, 3), (2, 1))  # rows, and tokens of padding


@contextmanager
def one_if_small(model: nn.Module) -> Iterator[None]:
    """Run operators on one thread while within, if the model is small.

    An operator of a small model is over before the threads of PyTorch have agreed on its parts; on
    a busy machine they wait for one another many times as long as they work. The results are those
    of the same operators: what is checked does not change.
    """
    if sum(parameter.numel() for parameter in model.parameters()) > N_SMALL:
        yield  # setting a count, even the same one, turns MKL's choice of threads off
        return
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def checked_engine(
    loaded: LoadedModel, limits: Limits | None = None, *, deterministic: bool = False
) -> BatchingEngine:
    """Return an engine in the fastest mode that gives what the model gives.

    Raises UnsupportedModelError where no mode does.
    """
    with one_if_small(loaded.model):
        mode = exact_mode(loaded)
    return BatchingEngine(loaded, limits, mode, deterministic=deterministic)


def exact_mode(loaded: LoadedModel) -> Mode:
    """Return the fastest mode in which engine and model agree.

    Where another than the first is taken, it warns with the reason; where none agrees, it raises
    UnsupportedModelError with it.
    """
    name, reasons = type(loaded.model).__name__, list[UnsupportedModelError]()
    for mode in MODES:
        # A switch of positions needs padding after a row; a model with its own masks would see it.
        if (
            mode.own_masks
            if loaded.rope_switch is not None
            else loaded.mask_pattern is None and not mode.own_masks
        ):
            continue
        try:
            verify(loaded, mode)
        except UnsupportedModelError as error:
            reasons.append(error)
        else:
            if reasons:
                warnings.warn(
                    f"{name} is exact only with {mode.in_words()}, which is slower; without: "
                    f"{reasons[0]}",
                    stacklevel=2,
                )
            return mode
    raise reasons[0]


def verify(loaded: LoadedModel, mode: Mode) -> Agreement:
    """Return the agreement of engine and model.

    Raises UnsupportedModelError where they do not, JuiceError for lack of memory. With quantised
    activations there is no bound: such models were accepted as approximate before.
    """
    name, narrow = type(loaded.model).__name__, replace(mode, sliding_window=SLIDING_WINDOW)
    with refusing(name, f"{name} cannot run with JuICE's cache"), ExitStack() as stack:
        try:
            engine = BatchingEngine(loaded, LIMITS, narrow)
            stack.callback(engine.stop)
            engine.loop.log_level = logging.DEBUG  # the mode is only tried
            define, *others = (
                defined_by(loaded, SLIDING_WINDOW, n_rows=n, n_padding=n_padding)
                for n, n_padding in [(1, 0), *_other_shapes(loaded)]
            )
            few = requests_at(loaded, LEAST_SCALE)[:N_ROUNDED]
            measured = agreement(
                engine,
                partial(requests_at, loaded),
                define,
                rounding=rounding_of(few, define, others[0]),
                others=others,
            )
        except JuiceError as error:
            raise UnsupportedModelError(
                f"{name} cannot run in batches of steered rows: {error}"
            ) from error
    if reason := engine.loop.failed_together:  # each was run alone
        raise UnsupportedModelError(f"{name} cannot run several requests together: {reason}")
    if loaded.exact and not measured.is_close(loaded.describe()):
        raise UnsupportedModelError(
            f"{name} is not steered exactly: in a batch with a cache its log-probabilities differ "
            f"from its own by {measured.share:.2g} of what steering changes, and unsteered by "
            f"{measured.unsteered:.2g}; it ignores the cache, masks or positions it is given, or "
            "mixes rows"
        )
    return measured


def _other_shapes(loaded: LoadedModel) -> Sequence[tuple[int, int]]:
    """Return the numbers of rows and of tokens after those that count, by which rounding differs.

    Such tokens would take a model across its switch of positions.
    """
    return [(n, 0 if loaded.rope_switch is not None else padding) for n, padding in OTHER_SHAPES]


def requests_at(loaded: LoadedModel, scale: float) -> list[Request]:
    """Return the requests of the check, whose largest coefficient is `scale`."""
    n, last = loaded.describe().vocabulary_size, loaded.layout.n_layers - 1
    middle = last // 2
    windows = [(0, last), (middle, middle + 1), (0, 1), (0, middle, last), (last - 1, last)]
    windows += [(1, last - 1)]
    steerings = [
        unsteered()
        if i in UNSTEERED
        else drawn_steering(loaded, windows[i % len(windows)], scale, seed=i)
        for i in range(len(LENGTHS))
    ]
    return requests_of(
        LENGTHS,
        steerings,
        n,
        top_logprobs=min(MAX_TOP_LOGPROBS, n),
        watch=spread(n),
    )


def drawn_steering(
    loaded: LoadedModel, layers: tuple[int, ...], scale: float, *, seed: int
) -> Steering:
    """Return the steering of all heads of some layers, each by a coefficient of its own.

    Args:
        loaded: The model.
        layers: The layers; those that the model does not have are left out.
        scale: The largest coefficient; the least is a quarter of it.
        seed: The seed of their draw.
    """
    draw, layout = Random(seed), loaded.layout
    coefficients = {
        layer: scale
        * torch.tensor(
            [
                draw.choice((-1, 1)) * draw.uniform(0.25, 1)
                for _ in range(layout.layers[layer].n_heads)
            ]
        )
        for layer in sorted({*layers} & {*range(layout.n_layers)})
    }
    return steering_by(coefficients, scale)
