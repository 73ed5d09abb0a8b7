"""What the server says it did, for clients that do not show it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.support.serving import Server, within


@contextmanager
def steers(server: Server, route: str, n_requests: int = 1) -> Iterator[list[str]]:
    """Collect the `steer` of the requests of a route that are made in the block.

    They come from the server's log, after the block. There must be `n_requests`.
    """
    found: list[str] = []

    def logged() -> list[str]:
        lines = [line for line in server.log() if line.get("route") == route]
        return [str(line["steer"]) for line in lines if "steer" in line]  # refused ones have none

    # A request's line comes after its answer: what came before is there once a later line is.
    asked = uuid.uuid4().hex
    httpx.get(f"{server.url}/v1/models", headers={"X-Request-Id": asked})
    within(
        10,
        lambda: any(line.get("id") == asked for line in server.log()),
        "a line of the log about a later request",
    )
    n_before = len(logged())
    yield found
    within(10, lambda: len(logged()) >= n_before + n_requests, f"a line of the log about {route}")
    found += logged()[n_before:]
    assert len(found) == n_requests
