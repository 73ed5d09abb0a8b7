"""Answers that were given before: the same request is asked once.

Answers are greedy, so what a method says to a prompt does not change with the seed where its
steering does not. A request is the same where its tokens, its steering and what decides about it
are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from juice.engine import GenerationRequest, Steering
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel


class Said(NamedTuple):
    """What came back: the text, and the log-probabilities of the watched tokens."""

    text: str
    watched: tuple[float, ...]


class Remembered:
    """The answers that were given so far."""

    def __init__(self) -> None:
        self._said: dict[bytes, Said] = {}

    def ask(
        self,
        model: SteeredModel,
        requests: Sequence[GenerationRequest],
        *,
        progress: Progress = silent,
        description: str = "asking",
    ) -> list[Said]:
        """Return the answers in the order of the requests; only new requests are run.

        Args:
            model: The model, the same in every call.
            requests: Greedy requests.
            progress: Reports how many new requests are answered.
            description: What the progress is called.
        """
        keys = [_key(request) for request in requests]
        new = {k: r for k, r in zip(keys, requests, strict=True) if k not in self._said}
        done = model.engine.generate(list(new.values()), progress=progress, description=description)
        for key, completion in zip(new, done, strict=True):
            self._said[key] = Said(completion.text, completion.watched)
        return [self._said[key] for key in keys]


def _key(request: GenerationRequest) -> bytes:
    gate, contrast = request.gate, request.contrast
    what = (
        request.prompt_ids,
        request.max_tokens,
        request.watch,
        _steered(request.steering),
        gate and (gate.signal, gate.threshold, gate.without_context),
        contrast and (contrast.prompt_ids, contrast.weight, contrast.is_adaptive),
    )
    return hashlib.sha256(repr(what).encode()).digest()


def _steered(steering: Steering) -> object:
    if not steering.coefficients:
        return None
    betas = {layer: own.tolist() for layer, own in sorted(steering.coefficients.items())}
    return steering.report.method, steering.first_position, betas
