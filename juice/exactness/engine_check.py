"""The check at every load: the engine gives what the model itself gives, steered and not.

A small batch runs through the engine (`juice.exactness.schedule`). Then each whole sequence runs
once more by the definition: in two runs, without our cache, masks, batches or hooks. The
log-probabilities must agree, to a small share of what steering changes in them or to the model's
own rounding, whichever is larger; heads are scaled by more until the first is far above the second.
They differ for an architecture that ignores the cache, the masks or the positions it is given, that
mixes rows, or that rows cannot enter between layers. The fastest mode that agrees is used; a model
for which none does is refused.

Sliding windows are longer than any prompt that a load has time for, so for the check the model gets
sliding windows of three tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from juice.batching import BatchingEngine, Mode
from juice.engine import GenerationRequest, Limits
from juice.errors import JuiceError, UnsupportedModelError
from juice.exactness.comparison import bound_of, compared
from juice.exactness.schedule import LIMITS, scheduled
from juice.exactness.threads import one_if_small
from juice.model.differences import distance, largest
from juice.model.loaded import LoadedModel
from juice.model.masks import narrow_sliding_windows

LOG = logging.getLogger("juice.exactness")
# Fastest first.
MODES = (Mode(), Mode(full_rows=True), Mode(own_masks=True), Mode(full_rows=True, own_masks=True))
SLIDING_WINDOW = 3
# Heads are scaled by more until what every request's steering changes is far above rounding.
LEAST_SCALE, MOST_SCALE = 2.0, 32.0
FAR = 40
# How far a generation may be from the two runs: a share of what steering changes, or this many
# times the difference that the shape of a batch makes to the model itself.
SHARE, TIMES_ROUNDING = 0.05, 4.0
# A forward of other shapes rounds differently: more rows, and tokens after those that count.
N_ROUNDED, N_ROWS, N_PADDING = 4, 5, 3


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

    Raises UnsupportedModelError, with the reason of the first mode, where none agrees.
    """
    reasons: list[UnsupportedModelError] = []
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
            LOG.info("%s is not exact in %s: %s", type(loaded.model).__name__, mode, error)
            reasons.append(error)
        else:
            return mode
    raise reasons[0]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How well an engine and its model agree.

    Args:
        unsteered: The largest difference of a chosen token's log-probability in a generation that
            is not steered, in nats.
        share: The error of the worst generation, as a share of what steering changes.
        bound: The share that is allowed.
    """

    unsteered: float
    share: float
    bound: float


def verify(loaded: LoadedModel, mode: Mode) -> Agreement:
    """Return how well engine and model agree.

    Raises UnsupportedModelError where they do not, JuiceError for lack of memory. With quantised
    activations there is no bound: such models were accepted as approximate before.
    """
    name = type(loaded.model).__name__
    try:
        agreement = _agreement(loaded, replace(mode, sliding_window=SLIDING_WINDOW))
    except torch.OutOfMemoryError as error:
        raise JuiceError(
            f"there is not enough memory to check {name}; choose another --device or --device-map, "
            "or a smaller --dtype"
        ) from error
    except JuiceError as error:
        raise UnsupportedModelError(
            f"{name} cannot run in batches of steered rows: {error}"
        ) from error
    except Exception as error:  # whatever a model raises at inputs that it does not expect
        raise UnsupportedModelError(f"{name} cannot run with JuICE's cache: {error!r}") from error
    is_close = agreement.share <= agreement.bound and agreement.unsteered <= bound_of(loaded)
    if loaded.exact and not is_close:
        raise UnsupportedModelError(
            f"{name} is not steered exactly: in a batch with a cache its log-probabilities differ "
            f"from its own by {agreement.share:.2g} of what steering changes, and unsteered by "
            f"{agreement.unsteered:.2g}; it ignores the cache, masks or positions it is given, or "
            "mixes rows"
        )
    return agreement


def _agreement(loaded: LoadedModel, mode: Mode) -> Agreement:
    engine, scale = BatchingEngine(loaded, LIMITS, mode), LEAST_SCALE
    try:
        while True:
            requests = scheduled(loaded, scale)
            rounding = _rounding(loaded, requests, mode.sliding_window)
            found = [
                compared(loaded, request, completion, mode.sliding_window)
                for request, completion in zip(requests, engine.generate(requests), strict=True)
            ]
            least = min(own.effect for own in found if own.effect)
            if least >= FAR * rounding or scale == MOST_SCALE:
                break
            # What steering changes grows with the scale, at first in proportion.
            scale = min(MOST_SCALE, scale * 1.5 * FAR * rounding / least)
    finally:
        engine.stop()
    shares = [
        (own.error / effect, max(SHARE, TIMES_ROUNDING * rounding / effect))
        for own in found
        for effect in [own.effect or least]
    ]
    share, bound = max(shares, key=lambda pair: (pair[0] != pair[0], pair[0] / pair[1]))
    unsteered = largest(own.difference for own in found if not own.effect)
    return Agreement(unsteered=unsteered, share=share, bound=bound)


@torch.inference_mode()
def _rounding(
    loaded: LoadedModel, requests: Sequence[GenerationRequest], sliding_window: int | None
) -> float:
    """Return how much a forward's shape alone changes the model's log-probabilities, in nats.

    The mean squares are those of `Comparison.error`; nothing here is ours but the tokens.
    """
    found = [0.0]
    # Tokens after those that count would take a model across its switch of positions.
    n_padding = N_PADDING if loaded.rope_switch is None else 0
    with loaded.turn, narrow_sliding_windows(loaded.model, sliding_window):
        for request in requests[:N_ROUNDED]:
            n, ids = len(request.prompt_ids), [*request.prompt_ids]
            alone = torch.tensor([ids], device=loaded.device)
            among = torch.tensor([ids + ids[:1] * n_padding] * N_ROWS, device=loaded.device)
            one, other = (
                loaded.run(input_ids=own, use_cache=False).logits[-1, n - 1].float().log_softmax(-1)
                for own in (alone, among)
            )
            found.append(distance(one, other))
    return largest(found)
