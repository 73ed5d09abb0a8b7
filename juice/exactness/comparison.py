"""What an engine generated, held against the two runs that define it."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from juice.engine import Completion, GenerationRequest
from juice.model.differences import distance, largest
from juice.model.loaded import LoadedModel
from juice.model.masks import narrow_sliding_windows
from juice.model.two_runs import two_runs

# In nats; half precision rounds differently for every shape of a batch.
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


class Comparison(NamedTuple):
    """How far a generation is from the two runs, in nats.

    Args:
        difference: The largest difference of a chosen token's log-probability.
        error: The difference of the log-probabilities at one token, as the root of the mean square
            over the tokens that were reported; the largest over the new tokens.
        effect: The same of the two runs from each other: what steering changes.
    """

    difference: float
    error: float
    effect: float


def bound_of(loaded: LoadedModel) -> float:
    """Return how far, in nats, a log-probability may be from that of the two runs.

    Products with packed weights may be computed in bfloat16, whatever the dtype of the model.
    """
    bound = TOLERANCES.get(loaded.dtype, TOLERANCES[torch.bfloat16])
    return bound if loaded.quantization is None else max(bound, TOLERANCES[torch.bfloat16])


def compared(
    loaded: LoadedModel,
    request: GenerationRequest,
    completion: Completion,
    sliding_window: int | None = None,
) -> Comparison:
    """Return how far a generation is from the two runs.

    Args:
        loaded: The model.
        request: The request; the log-probabilities that it watches are compared too.
        completion: What an engine gave for it, with any alternatives to its tokens.
        sliding_window: The width of sliding windows in that engine; None for the model's own.
    """
    tokens = torch.tensor([*request.prompt_ids, *completion.token_ids])
    clean, steered = _two_runs(loaded, request, tokens, sliding_window)
    chosen = steered.gather(1, tokens[len(request.prompt_ids) :, None])[:, 0]
    served = [
        (i, torch.tensor([t.id, *ids]), torch.tensor([t.logprob, *logprobs]))
        for i, t in enumerate(completion.tokens)
        for ids, logprobs in [tuple(zip(*t.top, strict=True)) or ((), ())]
    ]
    if request.watch:
        served.append((0, torch.tensor(request.watch), torch.tensor(completion.watched)))
    return Comparison(
        float((chosen - torch.tensor(completion.logprobs)).abs().max()),
        largest(distance(steered[i, ids], own) for i, ids, own in served),
        largest(distance(steered[i, ids], clean[i, ids]) for i, ids, _ in served),
    )


def _two_runs(
    loaded: LoadedModel,
    request: GenerationRequest,
    tokens: torch.Tensor,
    sliding_window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of the new tokens in both runs, [tokens, vocabulary]."""
    first, end, switch = len(request.prompt_ids) - 1, len(tokens) - 1, loaded.rope_switch
    # Tokens up to a switch of positions were chosen from a shorter text, with other keys.
    ends = [switch, end] if switch is not None and first < switch < end else [end]
    kept = [stop - start for start, stop in pairwise([first, *ends])]
    with loaded.turn, narrow_sliding_windows(loaded.model, sliding_window):
        runs = [
            two_runs(
                loaded,
                tokens[:stop].to(loaded.device),
                request.steering.coefficients,
                n,
                request.steering.first_position,
            )
            for stop, n in zip(ends, kept, strict=True)
        ]
    clean, steered = (torch.cat(parts).log_softmax(-1).cpu() for parts in zip(*runs, strict=True))
    return clean, steered
