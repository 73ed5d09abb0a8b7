"""Texts that take long: they wait in fair turns, within bounds, and not for clients that left."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from juice.files import MINI
from juice_server.dispatcher import SMALL_BYTES, Tokenizing
from juice_server.errors import BusyError
from tests.support.serving import CONFLICT, Server, gauge, raw_post, serving, within

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


def test_what_fails_for_a_client_that_left_is_no_error_of_the_server() -> None:
    """Kills: a traceback in the log for each form that is refused after its client has left."""
    gate, logged = Gate(), list[dict[str, Any]]()

    def fail() -> None:
        gate.work("a")
        raise ValueError("nobody reads this")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: logged.append(about))
        tokenizing = Tokenizing(1_000_000)
        task = asyncio.create_task(tokenizing.run("a", LARGE, fail))
        while not gate.begun:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gate.open()
        await tokenizing.run("b", LARGE, gc.collect)  # after it: large ones have one thread

    asyncio.run(run())
    assert logged == []


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


TURNS = [{"role": "user", "content": "What is the capital of <|user|> Peru?"}]
TOOL = {"type": "function", "function": {"name": "now"}}
MIXED: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"text": "The capital of Peru is Lima. " * 9}),
    ("/tokenize", {"messages": TURNS, "tools": [TOOL]}),
    ("/generate", {"prompt": CONFLICT, "max_tokens": 2, "steer": "context"}),
    ("/generate", {"prompt": "a", "max_tokens": 3, "guided_choice": ["red", "green"]}),
    ("/v1/chat/completions", {"messages": TURNS, "tools": [TOOL], "max_tokens": 2}),
    ("/v1/chat/completions",
     {"messages": TURNS, "tools": [TOOL], "max_tokens": 9, "tool_choice": "required"}),
    ("/detokenize", {"tokens": [300, 301]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def padding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve mini with a tokenizer that was saved with padding and truncation, as some are."""
    folder = Path(shutil.copytree(MINI, tmp_path_factory.mktemp("padding") / "mini"))
    parts = json.loads((folder / "tokenizer.json").read_text())
    parts["truncation"] = {
        "direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    parts["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1,
        "pad_type_id": 0, "pad_token": "<|end|>",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    with serving("--model", str(folder)) as running:
        yield running


@pytest.mark.parametrize("seconds", [3, pytest.param(30, marks=pytest.mark.long)])
def test_64_clients_share_a_tokenizer_and_each_gets_what_it_gets_alone(
    padding: Server, url: str, seconds: int
) -> None:
    """Its first reading changes it while others read: "Already borrowed", in some versions."""
    together, over = threading.Barrier(64), threading.Event()

    def ask(i: int) -> Counter[str]:
        seen: Counter[str] = Counter()
        with httpx.Client(base_url=padding.url, timeout=60) as client:
            together.wait(60)
            while not over.is_set():
                path, body = MIXED[(i + seen.total()) % len(MIXED)]
                answer = client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                if path == "/tokenize":
                    assert answer.json()["tokens"] == alone[json.dumps(body)]
                seen[path] += 1
        return seen

    alone = {
        json.dumps(body): httpx.post(f"{url}/tokenize", json=body).json()["tokens"]
        for path, body in MIXED
        if path == "/tokenize"
    }
    with ThreadPoolExecutor(64) as pool:
        running = [pool.submit(ask, i) for i in range(64)]
        over.wait(seconds)
        over.set()
    seen = sum((each.result() for each in running), Counter[str]())
    assert {*seen} == {path for path, _ in MIXED}
