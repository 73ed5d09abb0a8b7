"""The outermost middleware: every request gets an id, a JSON log line and a count in metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import asdict
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from juice.errors import EngineStoppedError
from juice_server.errors import CLIENT_GONE, failure_of
from juice_server.metrics import Metrics
from juice_server.trace import Trace, trace_of

ACCESS = logging.getLogger("juice_server.access")
PROBES = frozenset({"/healthz", "/readyz", "/metrics"})


class Observer:
    """The middleware that records every request."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

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
            self._metrics.answered(route, status, trace.code, trace.steer)
            # Probes come every few seconds; only their failures are worth a line.
            is_dull = route in PROBES and status == 200
            ACCESS.log(
                logging.DEBUG if is_dull else logging.INFO,
                "request",
                extra={"fields": _fields(scope, trace, route, status)},
            )


def _fields(scope: Scope, trace: Trace, route: str, status: int) -> dict[str, Any]:
    fields = {
        "id": trace.id,
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


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message and any extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line |= {"message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_as_json(*loggers: str) -> None:
    """Send the messages of these loggers to standard error, as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name in loggers:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
