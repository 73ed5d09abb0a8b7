"""The outermost middleware: every request gets an id, a log line, a span, a count in metrics."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from juice.errors import EngineStoppedError
from juice_server.errors import CLIENT_GONE, failure_of
from juice_server.telemetry.metrics import Metrics
from juice_server.trace import Trace, trace_of

if TYPE_CHECKING:
    from juice_server.telemetry.spans import Spans

ACCESS = logging.getLogger("juice_server.access")


class Observer:
    """The middleware that records every request; one without `spans` sends no traces."""

    def __init__(self, app: ASGIApp, metrics: Metrics, spans: Spans | None = None) -> None:
        self._app = app
        self._metrics, self._spans = metrics, spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request and record the outcome; an uncaught exception becomes a 500."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace, status = trace_of(scope), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", trace.id.encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            # The process ends before the request.
            if status:
                raise
            await failure_of(EngineStoppedError("the server is shutting down")).response(scope)(
                scope, receive, watched
            )
        except Exception as error:
            if status:
                raise
            await failure_of(error).response(scope)(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            status = status or CLIENT_GONE
            self._record(scope, trace, route, status)

    def _record(self, scope: Scope, trace: Trace, route: str, status: int) -> None:
        self._metrics.answered(route, status, trace)
        trace_id = None
        if self._spans is not None and not trace.is_dull:
            trace_id = self._spans.record(scope, trace, route, status)
        ACCESS.log(
            logging.DEBUG if trace.is_dull else logging.INFO,
            "request",
            extra={"fields": _fields(scope, trace, route, status, trace_id)},
        )


def _fields(
    scope: Scope, trace: Trace, route: str, status: int, trace_id: str | None
) -> dict[str, Any]:
    fields = {
        "id": trace.id,
        "trace_id": trace_id,
        "key": trace.client.name if trace.client.has_key else None,
        "method": scope["method"],
        "route": route,
        "status": status,
        "code": trace.code or None,
        "duration_s": round(trace.age_s, 4),
        "steer": trace.steer or None,
        "stream": trace.is_stream or None,
        "prompt_tokens": trace.n_prompt_tokens or None,
        "generated_tokens": trace.n_generated_tokens or None,
        "finish_reasons": trace.finish_reasons or None,
        "gates": [asdict(gate) for gate in trace.gates] or None,
        "prompts": list(trace.prompts) or None,
    }
    return {name: value for name, value in fields.items() if value is not None}
