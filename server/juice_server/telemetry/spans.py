"""OpenTelemetry traces: a span for each request, and below it what its generations did.

Names are those of the semantic conventions for HTTP servers and for generative AI; what is ours
begins with juice. No text of a prompt or an answer is in a span.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import zip_longest
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

import juice
from juice.engine import Completion
from juice.errors import UsageError
from juice_server.trace import Run, Trace

CHATS = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages"})
PROTOCOLS = ("grpc", "http/protobuf")
# Of a request with more choices, as many of the first that end have spans.
MAX_CHOICES = 64
CLOSING_S = 5.0
EXPORT_S = 5.0
Attributes = dict[str, Any]


class Spans:
    """Sends spans to a collector; what it cannot take is dropped, with a line in the log.

    Args:
        endpoint: The collector's URL.
        model_name: What clients call the model.

    Raises UsageError for a protocol that is not spoken.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        own = Resource({"service.name": "juice", "service.version": juice.__version__})
        self._provider = TracerProvider(
            resource=Resource.create().merge(own).merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("juice_server", juice.__version__)
        self._model_name = model_name

    def record(self, scope: Scope, trace: Trace, route: str, status: int) -> str:
        """Record a request that has ended, as a part of the client's trace where it has one.

        Args:
            scope: The request.
            trace: What was recorded of it.
            route: The path of its route, or "unmatched".
            status: Its HTTP status.

        Returns:
            The id of its trace, 32 hexadecimal digits.
        """
        ended_ns = time.time_ns()
        clock = _Clock(ended_ns - round(trace.age_s * 1e9), trace.begun)
        headers = Headers(scope=scope)
        span = self._tracer.start_span(
            f"{scope['method']} {route}",
            TraceContextTextMapPropagator().extract(headers),
            SpanKind.SERVER,
            _of_http(scope, headers, trace, route, status),
            start_time=clock.begun_ns,
        )
        if status >= 500:
            span.set_status(StatusCode.ERROR, trace.code)
        own = set_span_in_context(span)
        for run, then in zip_longest(trace.runs, trace.runs[1:]):
            run_ended_ns = clock.at(then.submitted) if then else ended_ns
            self._record_run(own, trace, run, route, clock, run_ended_ns)
        span.end(ended_ns)
        return f"{span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Send what is left, within a few seconds."""
        # A collector that does not answer would hold up the exit.
        closing = Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSING_S)

    def _record_run(
        self, parent: Context, trace: Trace, run: Run, route: str, clock: _Clock, ended_ns: int
    ) -> None:
        operation = "chat" if route in CHATS else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            parent,
            SpanKind.INTERNAL,
            {"gen_ai.operation.name": operation, **_of_generations(trace, run, self._model_name)},
            start_time=clock.at(run.submitted),
        )
        if error := _error_of(trace, run):
            span.set_status(StatusCode.ERROR, error)
        own = set_span_in_context(span)
        for i, completion in list(run.ended.items())[:MAX_CHOICES]:
            for name, start_s, end_s, attributes in _phases(completion):
                phase: Span = self._tracer.start_span(
                    name,
                    own,
                    SpanKind.INTERNAL,
                    {"juice.choice": i, **attributes},
                    start_time=clock.at(run.submitted + start_s),
                )
                phase.end(clock.at(run.submitted + end_s))
        span.end(ended_ns)


class _Clock:
    """Turns times of the monotonic clock, in seconds, into nanoseconds since 1970."""

    def __init__(self, begun_ns: int, begun_s: float) -> None:
        self.begun_ns, self._begun_s = begun_ns, begun_s

    def at(self, seconds: float) -> int:
        return self.begun_ns + round((seconds - self._begun_s) * 1e9)


def _exporter(endpoint: str) -> SpanExporter:
    """Return what sends spans; the protocol is OpenTelemetry's variable's, or fits the URL."""
    over_http = urlsplit(endpoint).path.endswith("/v1/traces")
    protocol = os.environ.get(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", PROTOCOLS[over_http]),
    )
    if protocol not in PROTOCOLS:
        raise UsageError(
            f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {protocol!r}; expected {' or '.join(PROTOCOLS)}"
        )
    if protocol == "grpc":
        is_safe = endpoint.startswith("https:")
        return OverGrpc(endpoint=endpoint, insecure=not is_safe, timeout=EXPORT_S)
    return OverHttp(endpoint=endpoint, timeout=EXPORT_S)


def _of_http(scope: Scope, headers: Headers, trace: Trace, route: str, status: int) -> Attributes:
    own = {
        "http.request.method": scope["method"],
        "http.route": route,
        "http.response.status_code": status,
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "user_agent.original": headers.get("user-agent"),
        "client.address": (scope.get("client") or (None,))[0],
        "error.type": trace.code or None,
        "juice.request_id": trace.id,
        "juice.key": trace.client.name if trace.client.has_key else None,
    }
    return _known(own)


def _of_generations(trace: Trace, run: Run, model_name: str) -> Attributes:
    first, steering = run.requests[0], run.requests[0].steering.report
    sampling = first.sampling
    own = {
        "gen_ai.provider.name": "juice",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.choice.count": trace.n_choices if trace.n_choices > 1 else None,
        "gen_ai.request.max_tokens": first.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stop_sequences": first.stop or None,
        "gen_ai.request.stream": trace.is_stream,
        "gen_ai.response.finish_reasons": [own.finish_reason for own in run.completions] or None,
        "gen_ai.usage.input_tokens": run.n_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(len(own.tokens) for own in run.completions),
        "error.type": _error_of(trace, run),
        "juice.steer": steering.target,
        "juice.method": steering.method if steering.applied else None,
        "juice.head_set": steering.head_set,
        "juice.strength": steering.strength if steering.applied else None,
    }
    return _known(own)


def _error_of(trace: Trace, run: Run) -> str | None:
    """Return the error of a run: that of the request, which ended with its last."""
    return trace.code or None if run is trace.runs[-1] else None


def _phases(completion: Completion) -> Iterator[tuple[str, float, float, Attributes]]:
    """Yield what a generation went through: name, start and end in seconds, attributes."""
    timing, gate = completion.timing, completion.steering.gate
    yield "queue", 0.0, timing.queued_s, {}
    start_s = timing.queued_s
    if timing.gate_s is not None and gate is not None:
        decided = {f"juice.gate.{name}": value for name, value in vars(gate).items()}
        yield "gate", *timing.gate_s, decided
        if not gate.steers:
            start_s = timing.gate_s[1]
    if timing.tokens_s:
        first_s, last_s = timing.tokens_s[0], timing.tokens_s[-1]
        n_in, n_out = completion.n_prompt_tokens, len(completion.tokens)
        yield "prefill", start_s, first_s, {"gen_ai.usage.input_tokens": n_in}
        yield "decode", first_s, last_s, {"gen_ai.usage.output_tokens": n_out}


def _known(attributes: Attributes) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}
