"""Clients that leave, whatever they asked for: all that ran or waited for them ends, nobody else's.

Everything here asks for more tokens than come before it is cut, and counts what was cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.serving import CONFLICT, LONG, Server, gauge, raw_post, within

N = 8
# The route, the body, and the answers that it asks for.
ASKED: dict[str, tuple[str, dict[str, Any], int]] = {
    "n": ("/generate", {"n": N}, N),
    "a list of prompts": ("/v1/completions", {"prompt": [CONFLICT, "Tokyo"] * 2, "n": 2}, N),
    "a comparison": ("/compare", {}, 3),
    "steered": ("/generate", {"steer": "context"}, 1),
}


@pytest.fixture(scope="module")
def server(served: Callable[..., Server]) -> Server:
    return served("--max-batch", str(N), "--max-queue", "40")


def is_idle(server: Server) -> bool:
    return gauge(server.url, "requests_running") == gauge(server.url, "requests_waiting") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_a_client_that_leaves_takes_all_its_rows_with_it(
    server: Server, name: str, stream: bool
) -> None:
    path, body, n = ASKED[name]
    cancelled = gauge(server.url, "cancelled_total")
    with server.connect() as connection:
        connection.sendall(raw_post({**LONG, **body, "stream": stream}, path))
        if stream:
            received = b""
            while b"data: " not in received:
                received += connection.recv(4096)
        within(20, lambda: gauge(server.url, "requests_running") == n, "they run")
    within(10, lambda: is_idle(server), "its rows are free")
    assert gauge(server.url, "cancelled_total") == cancelled + n, "none ran to its end"


@pytest.mark.parametrize("name", ASKED)
def test_a_client_that_leaves_the_queue_makes_room_in_it(server: Server, name: str) -> None:
    path, body, n = ASKED[name]
    with server.connect() as running:
        running.sendall(raw_post({**LONG, "n": N}))
        within(20, lambda: gauge(server.url, "requests_running") == N, "the batch is full")
        with server.connect() as queued:
            queued.sendall(raw_post({**LONG, **body}, path))
            within(20, lambda: gauge(server.url, "requests_waiting") == n, "it waits")
        within(10, lambda: gauge(server.url, "requests_waiting") == 0, "it is out of the queue")
        assert gauge(server.url, "requests_running") == N
    within(10, lambda: is_idle(server), "all rows are free")


def test_200_clients_that_leave_one_after_the_other_leave_no_rows(server: Server) -> None:
    for i in range(200):
        with server.connect() as connection:
            steer = ("none", "context", "parametric")[i % 3]
            connection.sendall(raw_post({**LONG, "steer": steer, "stream": i % 2 == 0}))
            time.sleep(0.01 * (i % 3))
    within(20, lambda: is_idle(server), "all rows are free")
    assert gauge(server.url, "kv_cache_occupancy_ratio") == 0
    answer = httpx.post(
        f"{server.url}/generate", json={"prompt": CONFLICT, "steer": "parametric", "max_tokens": 4}
    )
    assert answer.json()["text"].startswith(" Lima")
