"""For tests of a running engine: models, requests, a collector of updates, what must come out."""

from __future__ import annotations

import threading
from dataclasses import replace
from random import Random

import pytest
import torch

import juice
from juice.engine.answer import Completion, Update
from juice.engine.load_options import Limits
from juice.engine.own import rows as shelves
from juice.engine.own import scheduler as costs
from juice.engine.own.cache import SlotLayer
from juice.engine.own.thread import BatchingEngine
from juice.engine.request import Contrast, Request
from juice.engine.sampling_options import SamplingOptions
from juice.steered_model import SteeredModel
from tests.support import tiny
from tests.support.mixed import steering


def loaded(
    shape: str = "llama", *, dtype: torch.dtype = torch.float32, limits: Limits | None = None
) -> SteeredModel:
    return juice.load(
        tiny.tiny_model(shape).to(dtype), tokenizer=tiny.tiny_tokenizer(), limits=limits
    )


def random_request(rng: Random) -> Request:
    """Return a request of any length, heads, method, contrast and sampling."""
    heads = {
        (rng.randrange(tiny.N_LAYERS), rng.randrange(tiny.N_HEADS)): (
            rng.choice([-3, -1, 0.5, 2]) * rng.choice([0.5, 1, 2])
        )
        for _ in range(rng.choice([0, 1, 2, 3, 5]))
    }
    sampling = SamplingOptions(
        temperature=rng.choice([0, 0, 0.7, 1.5]),
        top_k=rng.choice([0, 20]),
        top_p=rng.choice([1, 0.8]),
        seed=rng.randrange(99),
    )
    contrast = None
    if not heads and rng.random() < 0.5:
        without = tuple(rng.randrange(1, 283) for _ in range(rng.choice([1, 4, 30])))
        contrast = Contrast(prompt_ids=without, strength=rng.choice([0.5, 1, 2]))
    return Request.of(
        prompt_ids=tuple(rng.randrange(1, 283) for _ in range(rng.choice([1, 2, 5, 13, 27, 60]))),
        contrast=contrast,
        max_tokens=rng.choice([1, 3, 9, 20]),
        ignore_eos=rng.random() < 0.8,
        **dict(sampling),
        **({"steering": steering(heads, rng.choice(["juice", "juice", "june"]))} if heads else {}),
    )


def assert_completes(
    completion: Completion,
    expected: tuple[list[int], torch.Tensor],
    tolerance: float,
    *,
    is_watched: bool = True,
) -> None:
    """Assert that a completion has the tokens and log-probabilities that an oracle gives.

    `expected` are the tokens and the logits [n_tokens, vocabulary] that chose them. Of the first
    logits the request watched every token, unless `is_watched` is False.
    """
    tokens, logits = expected
    assert list(completion.token_ids) == tokens
    logprobs = logits.log_softmax(-1)
    chosen = logprobs[torch.arange(len(tokens)), tokens]
    torch.testing.assert_close(torch.tensor(completion.logprobs), chosen, rtol=0, atol=tolerance)
    if is_watched:
        torch.testing.assert_close(
            torch.tensor(completion.watched), logprobs[0], rtol=0, atol=tolerance
        )


def rows_of(engine: BatchingEngine) -> list[object]:
    """Return all rows that are occupied, companions included."""
    return [
        row
        for shelf in engine.loop.shelves
        for row_list in (shelf.table.mains, *shelf.table.companions)
        for row in row_list.rows
    ]


def slot_layers_of(engine: BatchingEngine) -> list[SlotLayer]:
    """Return the slots of every layer on all shelves."""
    return [layer for shelf in engine.loop.shelves for layer in shelf.cache.slot_layers]


def n_slot_bytes(engine: BatchingEngine) -> int:
    """Return the bytes that all slots take."""
    return sum(kv.nbytes for each in slot_layers_of(engine) for kv in (each.keys, each.values))


def with_many_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Part rows wherever their lengths differ: by shelf, in prefill and in decoding."""
    monkeypatch.setattr(shelves, "SHORTEST", 8)
    monkeypatch.setattr(shelves, "FACTOR", 2)
    monkeypatch.setattr(costs, "TOKENS_PER_FORWARD", 1)
    right = costs.Costs.of.__func__
    monkeypatch.setattr(
        costs.Costs,
        "of",
        classmethod(lambda *arguments: replace(right(*arguments), keys_per_forward=0.0)),
    )


class Collector:
    """Collects what the engine sends, by request."""

    def __init__(self) -> None:
        self.updates: dict[int, list[Update]] = {}
        self.n_last = 0
        self.changed = threading.Condition()

    def __call__(self, update: Update) -> None:
        with self.changed:
            self.updates.setdefault(update.index, []).append(update)
            self.n_last += update.is_last
            self.changed.notify_all()

    def wait(self, n_last: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.n_last >= n_last, 120), (
                f"{self.n_last} of {n_last} requests ended"
            )

    def completion(self, index: int = 0) -> Completion:
        last = self.updates[index][-1]
        assert last.completion is not None, last.error
        return last.completion

    def error(self, index: int = 0) -> juice.JuiceError | None:
        return self.updates[index][-1].error
