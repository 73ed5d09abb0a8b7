"""Many requests to a model at once, with progress."""

from __future__ import annotations

from collections.abc import Sequence

from juice.engine import Completion, GenerationRequest
from juice.errors import ContextLengthError
from juice.progress import Progress
from juice.steered_model import SteeredModel


def fits(model: SteeredModel, request: GenerationRequest) -> bool:
    """Tell whether a request is short enough for the model."""
    try:
        model.engine.check(request)
    except ContextLengthError:
        return False
    return True


def ask_all(model: SteeredModel, requests: Sequence[GenerationRequest], description: str, progress: Progress) -> list[Completion]:
    """Run all requests in one batch and return their completions in their order; raises JuiceError as soon as one fails."""
    completions: dict[int, Completion] = {}
    with progress(description, len(requests)) as advance:
        for update in model.engine.stream(requests):
            if update.completion is not None:
                completions[update.index] = update.completion
                advance(1)
    return [completions[i] for i in range(len(requests))]
