"""The dispatcher over a real engine: whose turn it is, counted in steps, and what is left over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

import juice
from juice.engine.answer import Sink, Update
from juice.engine.load_options import Limits
from juice.engine.own.thread import BatchingEngine
from juice.engine.queue import with_room
from juice.engine.request import Request, numbered
from juice.errors import CancelledError, GenerationError, RequestError
from juice_server.dispatcher import Dispatcher, Turn
from juice_server.errors import BusyError, RateLimitedError
from juice_server.keys import Client
from tests.support.running import Collector, loaded, random_request, rows_of

A, B = Client(name="a"), Client(name="b")
N = 8


def request(n_new: int) -> Request:
    return Request.of(prompt_ids=(1, 2, 3), max_tokens=n_new, ignore_eos=True)


def submit(
    dispatcher: Dispatcher,
    client: Client,
    requests: list[Request],
    sink: Sink,
    *,
    priority: int = 0,
) -> list[Turn]:
    requests = [replace(one, client=client, priority=priority) for one in requests]
    return dispatcher.submit(numbered(requests), sink)


@pytest.fixture
def model() -> Iterator[juice.SteeredModel]:
    with loaded(limits=Limits(max_batch=with_room(N))) as model:
        yield model


@pytest.fixture
def dispatcher(model: juice.SteeredModel) -> Dispatcher:
    return Dispatcher(model.engine, max_waiting=500)


def test_a_short_request_starts_within_two_steps_of_500_long_ones(
    model: juice.SteeredModel, dispatcher: Dispatcher
) -> None:
    engine, first_step = model.engine, list[int]()
    before = engine.status.n_steps
    crowd = Collector()
    running = submit(dispatcher, A, [request(48)] * 500, crowd)
    while engine.status.n_steps < before + 10:
        time.sleep(0.001)
    done = threading.Event()

    def sink(update: Update) -> None:
        if update.tokens:
            first_step.append(engine.status.n_steps)
        if update.is_last:
            done.set()

    came = engine.status.n_steps
    submit(dispatcher, B, [request(2)], sink)
    assert done.wait(60)
    # It may come in the middle of a step, joins in the next, and has its token at the end of it.
    assert first_step[0] - came <= 2
    assert dispatcher.n_waiting > 450
    for one in running:
        one.cancel()
    crowd.wait(500)


def test_a_generation_that_ends_is_followed_in_the_next_step(
    model: juice.SteeredModel, dispatcher: Dispatcher
) -> None:
    """One-token requests fill every step, as they do without a dispatcher above."""
    engine, sizes = model.engine, list[int]()
    assert isinstance(engine, BatchingEngine)
    forward = engine.loop.runner.forward

    def watched(batch):
        sizes.append(len(batch.n_tokens))
        return forward(batch)

    engine.loop.runner.forward = watched  # type: ignore[method-assign]
    collector = Collector()
    submit(dispatcher, A, [request(1)] * 160, collector)
    collector.wait(160)
    assert sum(sizes) == 160
    assert len(sizes) <= 160 // N + 2


@pytest.mark.parametrize("seed", range(3))
def test_any_load_of_many_clients_completes_exactly(
    model: juice.SteeredModel, dispatcher: Dispatcher, seed: int
) -> None:
    """What comes through the dispatcher is what the engine gives to each request alone."""
    rng = Random(seed)
    requests = [random_request(rng) for _ in range(40)]
    alone = [model.engine.generate([asked])[0] for asked in requests]
    collectors = []
    for i, asked in enumerate(requests):
        collectors.append(Collector())
        client = rng.choice([A, B, Client(name="c", max_running=1)])
        submit(dispatcher, client, [asked], collectors[i], priority=rng.randrange(3))
    for collector, expected in zip(collectors, alone, strict=True):
        collector.wait(1)
        got = collector.completion()
        assert got.token_ids == expected.token_ids
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        assert got.timing.queued_s <= got.timing.tokens_s[0]
    assert dispatcher.n_waiting == 0


def test_what_is_cancelled_makes_room_whether_it_waits_or_runs(
    model: juice.SteeredModel, dispatcher: Dispatcher
) -> None:
    for _ in range(20):
        collector = Collector()
        running = submit(dispatcher, A, [request(48)] * 30, collector)
        Random(0).shuffle(running)
        for one in running:
            one.cancel()
        collector.wait(30)
        assert all(
            isinstance(collector.error(i), CancelledError)
            or collector.updates[i][-1].completion is not None
            for i in range(30)
        )
    assert dispatcher.n_waiting == dispatcher.n_running == 0
    assert isinstance(model.engine, BatchingEngine)
    assert rows_of(model.engine) == []


def test_whoever_leaves_pays_for_what_came(dispatcher: Dispatcher) -> None:
    """Kills: hanging up after most of an answer, for nothing."""
    client = Client(name="leaves", tokens_per_minute=600)

    def leave() -> None:
        collector = Collector()
        (turn,) = submit(dispatcher, client, [request(110)], collector)
        while sum(len(update.tokens) for update in collector.updates.get(0, [])) < 60:
            time.sleep(0.001)
        turn.cancel()
        collector.wait(1)

    for _ in range(5):
        leave()
    with pytest.raises(RateLimitedError):
        [leave() for _ in range(50)]  # sooner on a fast machine: what was spent comes back


def test_a_request_that_cannot_start_leaves_no_rows(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(dispatcher.engine, "start", fail)
    collector = Collector()
    submit(dispatcher, A, [request(1)] * 20, collector)
    collector.wait(20)
    assert isinstance(collector.error(), GenerationError)
    assert dispatcher.n_waiting == dispatcher.n_running == 0


def test_all_or_none_are_taken(dispatcher: Dispatcher) -> None:
    collector = Collector()
    long = request(120)
    running = submit(dispatcher, A, [long] * 508, collector)
    with pytest.raises(BusyError, match="room for 1 more answers, and this request needs 2"):
        submit(dispatcher, A, [request(1)] * 2, collector)
    with pytest.raises(RequestError):
        submit(dispatcher, B, [request(1), request(10**6)], collector)
    other = Collector()
    submit(dispatcher, B, [request(1)] * 20, other)
    other.wait(20)
    for one in running:
        one.cancel()
    collector.wait(508)


def test_an_engine_that_ends_ends_all_that_wait(
    model: juice.SteeredModel, dispatcher: Dispatcher
) -> None:
    collector = Collector()
    submit(dispatcher, A, [request(48)] * 400, collector)
    model.close()
    collector.wait(400)
    assert dispatcher.n_waiting == 0


def test_no_request_goes_before_the_priority_of_its_client(
    model: juice.SteeredModel, dispatcher: Dispatcher
) -> None:
    """Kills: a request that a route makes without the priority of the key."""
    collector = Collector()
    (turn,) = submit(dispatcher, Client(name="slow", priority=10), [request(2)], collector)
    collector.wait(1)
    assert turn.priority == 10
