"""Work for a client that may leave, within the time that its request has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from juice_server.errors import ClientGoneError, TimedOutError
from juice_server.trace import Trace, trace_of

T = TypeVar("T")


def left_s(trace: Trace, timeout_s: float) -> float:
    """Return the seconds that are left of a request's time, which began with its headers."""
    return trace.begun + timeout_s - time.monotonic()


def timed_out(timeout_s: float) -> TimedOutError:
    """Return the error of a request whose time is up."""
    return TimedOutError(f"the request took more than {timeout_s:g} s; ask for fewer tokens")


async def while_present(request: Request, timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Return what work gives; it is cancelled when the client leaves or the time is up.

    Raises ClientGoneError, TimedOutError, and what the work raises.
    """
    task, leaving = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        done, _ = await asyncio.wait(
            (task, leaving),
            timeout=max(0.0, left_s(trace_of(request.scope), timeout_s)),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if task in done:
            return task.result()
        if leaving in done:
            raise ClientGoneError("the client left")
        raise timed_out(timeout_s)
    finally:
        for one in (task, leaving):
            one.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
