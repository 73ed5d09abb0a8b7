"""Turns before the replicas of a model: by key, with as many rows as there are replicas."""

from __future__ import annotations

import asyncio

import pytest

from juice_server.clients import Client
from juice_server.errors import BusyError, NotAllowedError
from juice_server.on_ray.asked import Asked
from juice_server.on_ray.turns import Turns

ANN, BEN = Client(name="ann", has_key=True), Client(name="ben", has_key=True)
LONG = Asked(model="m", generates=True, cost=100)
SHORT = Asked(model="m", generates=True, cost=10)


async def started(turns: Turns, client: Client, asked: Asked, order: list[str]) -> asyncio.Event:
    """Start a request that notes its turn and runs until the event that is returned."""
    ends = asyncio.Event()

    async def run() -> None:
        async with turns.turn(client, asked):
            order.append(client.name)
            await ends.wait()

    ends.task = asyncio.create_task(run())  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    return ends


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_short_request_takes_the_next_turn_among_a_hundred_of_another_key() -> None:
    """Catches turns in the order of arrival, and a key that may hold every row."""

    async def play() -> None:
        turns, order = Turns(max_batch=2, max_queue=200), list[str]()
        turns.resize(1)
        many = [await started(turns, ANN, LONG, order) for _ in range(100)]
        await settle()
        assert order == ["ann"] * 2
        assert turns.n_waiting == 98
        await started(turns, BEN, SHORT, order)
        await settle()
        assert order == ["ann"] * 2 + ["ben"]  # the row that is kept for others
        await started(turns, BEN, SHORT, order)
        many[0].set()
        await settle()
        assert order[-1] == "ben"

    asyncio.run(play())


def test_nothing_starts_without_a_replica_and_a_new_one_brings_its_rows() -> None:
    async def play() -> None:
        turns, order = Turns(max_batch=8, max_queue=200), list[str]()
        for _ in range(40):
            await started(turns, ANN, LONG, order)
        await settle()
        assert (turns.n_running, turns.n_waiting, turns.waiting_tokens) == (0, 40, 4000)
        turns.resize(1)
        await settle()
        assert turns.n_running == 8
        turns.resize(3)
        await settle()
        assert turns.n_running == 24
        assert turns.waiting_tokens == 1600

    asyncio.run(play())


def test_the_rows_of_a_lost_replica_are_not_given_again() -> None:
    async def play() -> None:
        turns, order = Turns(max_batch=8, max_queue=200), list[str]()
        turns.resize(2)
        many = [await started(turns, ANN, LONG, order) for _ in range(40)]
        await settle()
        turns.resize(1)
        for ends in many[:8]:
            ends.set()
        await settle()
        assert turns.n_running == 8

    asyncio.run(play())


def test_a_client_that_leaves_while_it_waits_or_runs_leaves_nothing_behind() -> None:
    async def play() -> None:
        turns, order = Turns(max_batch=1, max_queue=200), list[str]()
        turns.resize(1)
        many = [await started(turns, ANN, LONG, order) for _ in range(3)]
        await settle()
        for ends in reversed(many):
            ends.task.cancel()  # type: ignore[attr-defined]
        await settle()
        assert (turns.n_running, turns.n_waiting, turns.waiting_tokens) == (0, 0, 0)

    asyncio.run(play())


def test_what_a_request_took_less_than_it_said_is_given_back() -> None:
    """Ann said 1000 and took 10: she is not behind Ben, who took 100."""

    async def play() -> None:
        turns, order = Turns(max_batch=8, max_queue=200), list[str]()
        turns.resize(1)
        async with turns.turn(ANN, Asked(model="m", generates=True, cost=1000)) as use:
            use.n_tokens = 10
        async with turns.turn(BEN, LONG):
            pass
        turns.resize(0)
        await started(turns, BEN, SHORT, order)
        await started(turns, ANN, SHORT, order)
        turns.resize(1)
        await settle()
        assert order == ["ann", "ben"]

    asyncio.run(play())


def test_the_bounds_of_a_key_hold_for_all_replicas_together() -> None:
    async def play() -> None:
        turns, order = Turns(max_batch=8, max_queue=4), list[str]()
        bounded = Client(name="c", has_key=True, max_running=2, max_waiting=1)
        turns.resize(3)
        for _ in range(3):
            turns.check(bounded, SHORT)
            await started(turns, bounded, SHORT, order)
        await settle()
        assert turns.n_running == 2
        with pytest.raises(BusyError, match="try again later"):
            turns.check(bounded, SHORT)
        with pytest.raises(NotAllowedError, match="priority is -1"):
            turns.check(ANN, Asked(model="m", generates=True, priority=-1))

    asyncio.run(play())
