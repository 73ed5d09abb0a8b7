"""Texts that take long: they wait in fair turns, within bounds, and not for clients that left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter

import httpx
import pytest

from juice_server.dispatcher import SMALL_BYTES, Tokenizing
from juice_server.errors import BusyError
from tests.support.serving import CONFLICT, gauge, raw_post, serving, within

LARGE = 2 * SMALL_BYTES


class Gate:
    """Work in threads that ends when told to; counts what has begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._open = threading.Event()

    def work(self, name: str) -> None:
        self.begun.append(name)
        assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()


def test_large_texts_take_turns_and_small_ones_do_not_wait_for_them() -> None:
    async def run() -> None:
        tokenizing, gate = Tokenizing(1_000_000), Gate()
        large = [
            asyncio.create_task(tokenizing.run("a", LARGE, lambda: gate.work("a")))
            for _ in range(10)
        ]
        other = asyncio.create_task(tokenizing.run("b", LARGE, lambda: gate.work("b")))
        await asyncio.sleep(0.1)
        assert gate.begun == ["a"]
        assert tokenizing.n_waiting == 10
        assert await asyncio.wait_for(tokenizing.run("b", 100, lambda: 7), 5) == 7
        gate.open()
        await asyncio.gather(*large, other)
        assert gate.begun.index("b") <= 2, "not behind everything of another client"
        assert tokenizing.n_waiting == 0

    asyncio.run(run())


def test_what_waits_for_a_client_that_left_is_not_begun() -> None:
    async def run() -> None:
        tokenizing, gate = Tokenizing(1_000_000), Gate()
        tasks = [
            asyncio.create_task(tokenizing.run("a", LARGE, lambda: gate.work("a")))
            for _ in range(10)
        ]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert tokenizing.n_waiting == 0
        # The one that has begun still has the thread.
        last = asyncio.create_task(tokenizing.run("b", LARGE, lambda: gate.work("b")))
        await asyncio.sleep(0.1)
        assert gate.begun == ["a"]
        gate.open()
        await last
        assert gate.begun == ["a", "b"]

    asyncio.run(run())


def test_the_bytes_that_wait_are_bounded_and_one_client_cannot_have_them_all() -> None:
    async def run() -> None:
        tokenizing, gate = Tokenizing(LARGE), Gate()
        tasks = [
            asyncio.create_task(tokenizing.run("a", LARGE, lambda: gate.work("a")))
            for _ in range(17)
        ]
        await asyncio.sleep(0.01)
        refused = [task for task in tasks if task.done()]
        assert 1 <= len(refused) <= 3
        for task in refused:
            with pytest.raises(BusyError, match="bytes wait to be tokenized"):
                await task
        other = asyncio.create_task(tokenizing.run("b", LARGE, lambda: gate.work("b")))
        await asyncio.sleep(0.01)
        assert not other.done()
        gate.open()
        await asyncio.gather(*(task for task in tasks if task not in refused), other)

    asyncio.run(run())


def test_large_texts_of_one_client_hold_up_nobody_and_not_for_those_that_left() -> None:
    """Kills: 150 prompts of a million characters kept everybody waiting for minutes."""
    text = "The capital of Peru is Lima. " * 34_000
    body = raw_post({"text": text}, "/tokenize")
    with serving("--max-connections", "200", "--log-format", "json") as server:
        crowd = [server.connect() for _ in range(24)]
        for connection in crowd:
            connection.sendall(body)
        within(
            30,
            lambda: gauge(server.url, "requests_waiting_to_be_tokenized") > 2,
            "they wait, and are seen to",
        )
        begun = time.monotonic()
        answer = httpx.post(
            f"{server.url}/generate", json={"prompt": CONFLICT, "max_tokens": 4}, timeout=60
        )
        took = time.monotonic() - begun
        assert answer.status_code == 200
        assert gauge(server.url, "requests_waiting_to_be_tokenized") > 2, f"{took:.1f} s later"
        for connection in crowd:
            connection.close()
        within(
            10,
            lambda: gauge(server.url, "requests_waiting_to_be_tokenized") == 0,
            "nobody waits any more",
        )
        codes = Counter(line.get("code") for line in server.log() if line.get("route"))
        assert set(codes) <= {None, "client_gone", "queue_full"}


def test_the_time_that_tokenizing_takes_is_part_of_the_requests_time() -> None:
    text = "The capital of Peru is Lima. " * 34_000
    with serving("--request-timeout", "2") as server:
        crowd = [server.connect() for _ in range(14)]
        for connection in crowd:
            connection.sendall(raw_post({"text": text}, "/tokenize"))
        within(
            30,
            lambda: gauge(server.url, "requests_waiting_to_be_tokenized") > 6,
            "they wait",
        )
        begun = time.monotonic()
        answer = httpx.post(f"{server.url}/tokenize", json={"text": text}, timeout=60)
        assert answer.status_code in (200, 429, 503)
        within(
            10,
            lambda: gauge(server.url, "requests_waiting_to_be_tokenized") == 0,
            "all are answered",
        )
        assert time.monotonic() - begun < 10
        for connection in crowd:
            connection.close()
