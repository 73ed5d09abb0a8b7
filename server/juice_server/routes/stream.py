"""Answers, whole or as server-sent events, whose status waits for the first update."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from juice.engine.answer import Completion, Update
from juice.engine.request import Request
from juice.engine.steer import SteeringReport
from juice.errors import JuiceError
from juice_server.errors import ANSWERS, ClientGoneError, Failure, failure_of
from juice_server.fields import STEERING_HEADER, Answer
from juice_server.http import while_present
from juice_server.service import Service
from juice_server.trace import trace_of

Event = dict[str, Any]
TOLD = ("applied", "target", "method", "head_set", "strength")
DONE = "data: [DONE]\n\n"
# Line ends of Unicode, at which some clients split a stream; JSON may hold them as they are.
LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\u0085\u2028\u2029"}


class EventStream(StreamingResponse):
    """A stream that ends what runs for it however it ends."""

    def __init__(
        self,
        lines: AsyncIterator[str],
        headers: Mapping[str, str],
        updates: AsyncGenerator[Update],
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._updates, self._is_sent = updates, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, and record where its client does not stay to its end."""
        async with aclosing(self._updates):
            await super().__call__(scope, receive, send)
        if not self._is_sent:
            trace_of(scope).code = ANSWERS[ClientGoneError][1]

    async def stream_response(self, send: Send) -> None:
        """Send all of it; cancelled when the client leaves."""
        await super().stream_response(send)
        self._is_sent = True


class Renderer(ABC):
    """Turns completions into the answer of a protocol, or updates into the events of a stream."""

    id_prefix: ClassVar[str]
    says_done: ClassVar = True
    """Whether `[DONE]` ends a stream: some protocols have another last event."""

    def __init__(self, service: Service, request: HttpRequest) -> None:
        self._service, self._request = service, request
        self._description = service.model.description
        self._texts, self._model_name = service.translator.texts, service.translator.model_name
        self._trace = trace_of(request.scope)
        self._id, self._created = f"{self.id_prefix}{uuid.uuid4().hex}", int(time.time())

    @abstractmethod
    def of(self, completions: list[Completion]) -> Answer:
        """Return the whole answer."""

    @abstractmethod
    def events(self, update: Update) -> Iterable[Event]:
        """Return the events of one update."""

    @abstractmethod
    def closing(self, completions: list[Completion]) -> Iterable[Event]:
        """Return the events after the last update."""

    def failed(self, failure: Failure) -> Event:
        """Return the event of an error."""
        return failure.body()

    async def answered(self, requests: Sequence[Request], *, is_stream: bool) -> Response:
        """Generate, and return a stream or the whole answer; raises JuiceError."""
        if is_stream:
            return await self._stream(requests)
        completions = await self._service.complete(self._request, requests)

        def rendered() -> Response:
            answer = self.of(completions).model_dump(by_alias=True)
            return JSONResponse(answer, headers=_told(one.steering for one in completions))

        return await asyncio.to_thread(rendered)

    async def _stream(self, requests: Sequence[Request]) -> EventStream:
        """Start generating: an error before the first update is raised, a later one is an event."""
        trace, timeout_s = self._trace, self._service.settings.request_timeout
        trace.is_stream = True
        updates = self._service.updates(self._request, requests)

        async def begun() -> Update | None:
            return await anext(updates, None)

        try:
            first = await while_present(self._request, timeout_s, begun())
        except BaseException:
            await updates.aclose()
            raise

        async def lines() -> AsyncIterator[str]:
            try:
                for event in self.events(first) if first is not None else ():
                    yield line(event)
                async for update in updates:
                    for event in self.events(update):
                        yield line(event)
                for event in self.closing(trace.submissions[-1].completions):
                    yield line(event)
            except JuiceError as error:
                failure = failure_of(error)
                trace.code = failure.code or ""
                yield line(self.failed(failure))
            if self.says_done:
                yield DONE

        reports = [request.steering.report for request in requests]
        undecided = {"applied"} if any(request.gate for request in requests) else ()
        return EventStream(lines(), _told(reports, undecided), updates)


def _told(reports: Iterable[SteeringReport], undecided: Collection[str] = ()) -> dict[str, str]:
    """Return the header that says what was applied, for clients that drop unknown fields.

    It leaves out what is undecided, and what does not hold for all answers.
    """
    first, *others = reports
    told = {
        name: getattr(first, name)
        for name in TOLD
        if name not in undecided
        and all(getattr(other, name) == getattr(first, name) for other in others)
    }
    return {STEERING_HEADER: json.dumps(told, separators=(",", ":"))}


def line(event: Event) -> str:
    """Format an event for sending; one that has a type is named by it."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS)
    return f"{name}data: {data}\n\n"
