"""`explain: effect`: what steering and the context changed at the first new token."""

from __future__ import annotations

import math
from dataclasses import replace
from queue import SimpleQueue

import pytest
import torch
from transformers import PreTrainedModel

from juice.engine.answer import Sink, Update
from juice.engine.contract import Engine
from juice.engine.request import Request
from juice.engine.steer import Steer
from juice.errors import CancelledError, GenerationError, JuiceError, RequestError
from juice.steered_model import SteeredModel
from tests.support import oracle
from tests.support.canned_engine import CannedRequest, HeldEngine
from tests.support.mixed import mixed_requests, steering
from tests.support.running import Collector

TOLERANCE = 1e-3


def distribution(
    network: PreTrainedModel, ids: tuple[int, ...], heads: oracle.Heads, method: str
) -> torch.Tensor:
    """Return the log-probabilities of the next token, by the definition."""
    logits = oracle.steered_logits(network, list(ids), heads, method=method)[-1]
    return logits.double().log_softmax(-1)


def exact(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.exp() * (one - other)).sum())


def grouped(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the divergence over the first's twenty likeliest tokens, and all others as one."""
    pairs = [(float(one[t].exp()), float(other[t].exp())) for t in one.topk(20).indices.tolist()]
    pairs.append((1 - sum(p for p, _ in pairs), 1 - sum(q for _, q in pairs)))
    return sum(p * math.log(p / q) for p, q in pairs if p > 1e-6)


def test_it_is_what_the_definition_says(engine: Engine, network: PreTrainedModel) -> None:
    """Kills: another request's token, a later one, the wrong direction, and runs that are steered
    where they should not be.
    """
    requests, expected = [], []
    for i, (request, heads, method) in enumerate(mixed_requests(seed=21, n=16)):
        alone = request.prompt_ids[: max(1, len(request.prompt_ids) // 2)] if i % 3 else ()
        requests.append(
            replace(
                request.with_options(watch=(), explain="effect", top_logprobs=i % 4),
                without_context=alone,
            )
        )
        expected.append(
            (
                distribution(network, request.prompt_ids, {}, method),
                distribution(network, request.prompt_ids, heads, method),
                distribution(network, alone, {}, method) if alone else None,
            )
        )
    for request, completion, (plain, steered, alone) in zip(
        requests, engine.generate(requests), expected, strict=True
    ):
        effect = completion.steering.effect
        for found, given in (
            (effect.unsteered, plain),
            (effect.steered, steered),
            (effect.without_context, alone),
        ):
            assert (found is None) == (given is None)
            if found is not None:
                assert given[found.id] == pytest.approx(float(given.max()), abs=TOLERANCE)
                assert found.probability == pytest.approx(float(given.exp().max()), abs=TOLERANCE)
        assert effect.divergence == pytest.approx(grouped(plain, steered), abs=TOLERANCE)
        assert effect.divergence <= exact(plain, steered) + TOLERANCE
        if alone is not None:
            assert effect.context_divergence == pytest.approx(grouped(plain, alone), abs=TOLERANCE)
        assert {len(token.top) for token in completion.tokens} == {request.options.top_logprobs}


def test_the_answer_is_what_it_is_without(engine: Engine) -> None:
    requests = [request for request, *_ in mixed_requests(seed=22, n=12)]
    plain = engine.generate(requests)
    explained = engine.generate([r.with_options(explain="effect") for r in requests])
    for one, other in zip(plain, explained, strict=True):
        assert (one.token_ids, one.watched) == (
            other.token_ids,
            pytest.approx(other.watched, abs=1e-4),
        )
        assert one.steering == replace(other.steering, effect=None, warnings=())
        assert [t.top for t in one.tokens] == [t.top for t in other.tokens]


def test_updates_come_as_they_would_and_the_last_one_has_it(model: SteeredModel) -> None:
    request = model.request([3, 5, 7], max_tokens=4, ignore_eos=True, explain="effect")
    updates: list[Update] = list(model.engine.stream([request]))
    assert sum(len(update.tokens) for update in updates) == 4
    assert [update.is_last for update in updates] == [False] * (len(updates) - 1) + [True]
    assert updates[-1].completion.steering.effect.unsteered.id == updates[0].tokens[0].id


def test_words_say_why_nothing_changed(model: SteeredModel) -> None:
    """A head scaled by next to nothing changes nothing; the prompt as its context is not used."""
    nothing = Steer(coefficients=[(0, 0, 1e-6)])
    done = model.generate(
        [[3, 5, 7]] * 2,
        steer=nothing,
        without_context=[None, (3, 5, 7)],
        explain="effect",
        max_tokens=1,
    )
    assert "steering changed nothing at the first token" in done[0].steering.warnings[-1]
    assert "context was not used" not in done[0].steering.warnings[-1]
    assert "the context was not used" in done[1].steering.warnings[-1]
    assert done[1].steering.effect.context_divergence == pytest.approx(0, abs=1e-4)
    much = Steer(coefficients=[(1, 1, 30.0)])
    assert model.generate([3, 5, 7], steer=much, explain="effect")[0].steering.warnings == ()


def test_it_needs_a_new_token(model: SteeredModel) -> None:
    with pytest.raises(RequestError, match="max_tokens is 0") as caught:
        model.request([3, 5], max_tokens=0, prompt_logprobs=True, explain="effect")
    assert caught.value.param == "explain"


def test_one_that_is_cancelled_ends(model: SteeredModel) -> None:
    """Kills: a last update that waits for ever."""
    request = model.request([3, 5, 7], max_tokens=64, ignore_eos=True, explain="effect")
    updates: SimpleQueue[Update] = SimpleQueue()
    running = model.engine.submit([request], updates.put)
    running[0].cancel()
    while not (update := updates.get(timeout=60)).is_last:
        pass
    assert isinstance(update.error, CancelledError)


@pytest.mark.parametrize("is_compared", [False, True])
def test_what_runs_beside_one_that_is_cancelled_is_cancelled_with_it(is_compared: bool) -> None:
    """Kills: prompts that go through the model for a request that nobody waits for."""
    engine, collector = HeldEngine(), Collector()
    request = Request.of(
        prompt_ids=(3, 5, 7), max_tokens=4, steering=steering({(1, 1): 2.0}), explain="effect"
    )
    (running,) = engine.submit([replace(request, without_context=(5,))], collector)
    unsteered, itself = engine.submitted
    if is_compared:
        unsteered.run()
    running.cancel()
    itself.run()
    assert isinstance(collector.error(), CancelledError)
    others = [other for other in engine.submitted if other is not itself]
    assert len(others) == (3 if is_compared else 1)
    assert all(isinstance(other.cancelled, CancelledError) for other in others)


def test_one_that_is_cancelled_after_its_own_end_ends_with_what_runs_beside_it() -> None:
    """Kills: prompts that go through the model for a client that has left."""
    engine, collector = HeldEngine(), Collector()
    request = Request.of(
        prompt_ids=(3, 5, 7), max_tokens=4, steering=steering({(1, 1): 2.0}), explain="effect"
    )
    (running,) = engine.submit([replace(request, without_context=(5,))], collector)
    unsteered, itself = engine.submitted
    unsteered.run()
    itself.run()
    reason = JuiceError("it took too long")
    running.cancel(reason)
    steered, alone = engine.submitted[2:]
    assert steered.cancelled
    assert alone.cancelled
    assert not collector.n_last
    steered.run()
    alone.run()
    assert collector.n_last == 1
    assert collector.error() is reason


def test_one_that_cannot_start_is_not_among_those_that_run() -> None:
    """Kills: what explains one request in the place of another."""

    class StartsTwo(HeldEngine):
        def start(self, request: Request, sink: Sink, **given: object) -> CannedRequest:
            if request.options.max_tokens == 3:
                raise GenerationError("it does not start")
            return super().start(request, sink, **given)

    engine, collector = StartsTwo(), Collector()
    request = Request.of(prompt_ids=(3, 5), max_tokens=4, explain="effect")
    (running,) = engine.submit([request.with_options(max_tokens=3), request], collector)
    running.cancel()
    first, second, itself = engine.submitted
    assert isinstance(collector.error(0), GenerationError)
    assert first.cancelled
    assert second.cancelled
    assert itself.cancelled


def test_nothing_is_compared_with_one_that_has_ended_with_an_error() -> None:
    engine, collector = HeldEngine(), Collector()
    request = Request.of(prompt_ids=(3, 5), max_tokens=4, explain="effect")
    (running,) = engine.submit([replace(request, without_context=(5,))], collector)
    unsteered, itself = engine.submitted
    running.cancel()
    itself.run()
    unsteered.cancelled = None  # its token came in the same step
    unsteered.run()
    assert engine.submitted == [unsteered, itself]
