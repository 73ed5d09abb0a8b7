"""A replica without Ray: the messages of its answers, what it holds, and its health."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from juice_server.keys import Client
from juice_server.on_ray.replica import Replica
from tests.support.serving import CONFLICT, LONG

ANN = Client(name="ann", has_key=True)


def answer(
    replica: Replica,
    body: dict[str, Any],
    client: Client = ANN,
    *,
    method: str = "POST",
    path: str = "/generate",
) -> AsyncIterator[list[Any]]:
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("10.0.0.1", 1),
    }
    return replica.answer(scope, json.dumps(body).encode(), "req-1", client)


async def n_running(replica: Replica) -> float:
    """Return how many generations run in a replica, by its metrics."""
    messages = answer(replica, {}, method="GET", path="/metrics")
    text = b"".join([m.get("body", b"") async for batch in messages for m in batch]).decode()
    (value,) = re.findall(r"(?m)^juice_requests_running\S* (\S+)$", text)
    return float(value)


def with_replica(play: Callable[[Replica], Awaitable[None]], **flags: Any) -> None:
    async def run() -> None:
        replica = Replica.__new__(Replica)
        await replica.__init__({"model": "mini", "kv_memory": "64MiB", **flags})  # type: ignore[misc]
        try:
            await play(replica)
        finally:
            await replica.__del__()

    asyncio.run(run())


def test_an_answer_is_steered_and_names_its_replica() -> None:
    async def play(replica: Replica) -> None:
        body = {"prompt": CONFLICT, "steer": "parametric", "max_tokens": 8}
        messages = [message async for batch in answer(replica, body) for message in batch]
        headers = dict(messages[0]["headers"])
        assert (messages[0]["status"], headers[b"x-request-id"]) == (200, b"req-1")
        assert b"x-juice-replica" in headers
        told = json.loads(b"".join(message["body"] for message in messages[1:]))
        assert told["steering"]["applied"] is True
        assert not messages[-1].get("more_body", False)

    with_replica(play)


def test_a_key_is_held_to_its_bounds() -> None:
    async def play(replica: Replica) -> None:
        client = replace(ANN, requests_per_minute=1)
        body = {"prompt": CONFLICT, "max_tokens": 2}
        answers = [
            [message async for batch in answer(replica, body, client) for message in batch]
            for _ in range(2)
        ]
        assert [messages[0]["status"] for messages in answers] == [200, 429]

    with_replica(play)


def test_a_stream_comes_in_pieces_and_one_that_is_left_is_cancelled() -> None:
    async def play(replica: Replica) -> None:
        stream = answer(replica, {**LONG, "stream": True})
        n_batches = 0
        async for _ in stream:
            n_batches += 1
            if n_batches == 3:
                break
        assert await n_running(replica) == 1
        await stream.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(5):
            while await n_running(replica):
                await asyncio.sleep(0.01)

    with_replica(play)


def test_a_model_that_cannot_be_loaded_fails_the_start_with_the_reason() -> None:
    async def play(_replica: Replica) -> None:
        raise AssertionError("it started")

    with pytest.raises(Exception, match="no-such-model"):
        with_replica(play, model="./no-such-model")


def test_a_stuck_engine_is_unhealthy_and_ends_the_process(tmp_path: Path) -> None:
    """Ray Serve asks `check_health`, and starts another replica when the process has ended."""
    program = f"""
import asyncio, json, time
from pathlib import Path
from juice.engine.own.loop import Loop
step = Loop.step
def broken(self):
    if Path({str(tmp_path / "hang")!r}).exists():
        time.sleep(600)
    step(self)
Loop.step = broken
from tests.server.on_ray.test_replica import LONG, Path, Replica, answer, with_replica
async def play(replica):
    await replica.check_health()
    stream = answer(replica, {{**LONG, "stream": True}})
    print(await anext(stream) and "streams", flush=True)
    Path({str(tmp_path / "hang")!r}).touch()
    while True:
        await asyncio.sleep(0.2)
        try:
            await replica.check_health()
        except RuntimeError as error:
            print("unhealthy:", error, flush=True)
            break
    print([own async for own in stream][-1] and "cut", flush=True)
    await asyncio.sleep(60)
with_replica(play, engine_timeout=2)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split("\n")[:3] == ["streams", "unhealthy: engine stuck", "cut"], done.stderr
    assert done.returncode == 1
