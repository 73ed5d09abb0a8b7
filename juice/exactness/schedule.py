"""The requests of the check at every load: a small batch in which every kind of mistake shows.

More than eight rows run at once, steered and not, in every order; rows join as others leave, a long
prompt is prefilled in chunks beside short ones, and prompts, answers and windows differ in length.
Every head of a steered layer has a coefficient of its own. Some requests steer two layers with the
whole model between them, some two neighbours, some three layers.
"""

from __future__ import annotations

from random import Random

import torch

from juice.engine import GenerationRequest, Limits, Steering, SteeringReport
from juice.engine.request import MAX_TOP_LOGPROBS
from juice.engine.steering import unsteered
from juice.model.loaded import LoadedModel

# The memory is as good as unlimited: a few tokens always fit.
LIMITS = Limits(max_batch=11, max_prefill_tokens=24, kv_memory_bytes=1 << 50)
# The tokens of each prompt and of its answer; the requests of UNSTEERED are not steered.
LENGTHS = (
    (12, 4), (3, 5), (2, 6), (5, 3), (4, 4), (7, 2), (2, 5), (6, 3), (3, 6), (5, 4), (2, 3),
    (4, 2), (9, 3), (3, 2),
)  # fmt: skip
UNSTEERED = frozenset({1, 6, 9})
# So many log-probabilities, spread over the vocabulary, are compared at each first new token; those
# of all of a large one would take most of the check's time.
N_WATCHED = 4096


def scheduled(loaded: LoadedModel, scale: float) -> list[GenerationRequest]:
    """Return the requests of the check.

    Args:
        loaded: The model.
        scale: The largest coefficient.
    """
    n, last = loaded.vocabulary_size, loaded.layout.n_layers - 1
    middle = last // 2
    windows = [(0, last), (middle, middle + 1), (0, 1), (0, middle, last), (last - 1, last)]
    windows += [(1, last - 1)]
    return [
        GenerationRequest(
            prompt_ids=tuple((7 * j + 5 * i + 1) % n for j in range(length)),
            max_tokens=n_new,
            ignore_eos=True,
            steering=unsteered()
            if i in UNSTEERED
            else steering_of(loaded, windows[i % len(windows)], scale, seed=i),
            top_logprobs=min(MAX_TOP_LOGPROBS, n),
            watch=tuple(range(0, n, -(-n // N_WATCHED))),
        )
        for i, (length, n_new) in enumerate(LENGTHS)
    ]


def steering_of(
    loaded: LoadedModel, layers: tuple[int, ...], scale: float, *, seed: int
) -> Steering:
    """Return the steering of all heads of some layers, each by a coefficient of its own.

    Args:
        loaded: The model.
        layers: The layers; those that the model does not have are left out.
        scale: The largest coefficient; the least is a quarter of it.
        seed: What draws them.
    """
    draw = Random(seed)
    coefficients = {
        layer: scale
        * torch.tensor(
            [
                draw.choice((-1, 1)) * draw.uniform(0.25, 1)
                for _ in range(loaded.layout.layers[layer].n_heads)
            ]
        )
        for layer in sorted({*layers} & {*range(loaded.layout.n_layers)})
    }
    report = SteeringReport(
        applied=True, target="context", beta_plus=scale, strength=1.0, n_heads=len(coefficients)
    )
    return Steering(coefficients=coefficients, report=report)
