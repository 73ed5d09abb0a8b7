"""OpenTelemetry traces: a span for each request, and below it the phases of its generations.

Names are those of the semantic conventions for HTTP servers and for generative AI; our additions
begin with juice. No text of a prompt or an answer is in a span.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

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
from juice.engine.answer import Completion
from juice.errors import UsageError
from juice_server.trace import Submission, Trace

CHATS = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages"})
PROTOCOLS = ("grpc", "http/protobuf")
# The most choices of a request that have spans: the first that end.
MAX_CHOICES = 64
CLOSING_S = EXPORT_S = 5.0
Attributes = dict[str, Any]


class Spans:
    """Sends spans to a collector; those that it cannot take are dropped, with a line in the log.

    Raises UsageError for a protocol that is not spoken.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        server = Resource({"service.name": "juice", "service.version": juice.__version__})
        self._provider = TracerProvider(
            resource=Resource.create().merge(server).merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("juice_server", juice.__version__)
        self._model_name = model_name

    def record(self, scope: Scope, trace: Trace, route: str, status: int) -> str:
        """Record a request that has ended, as a part of the client's trace where it has one.

        Returns:
            The id of its trace, 32 hexadecimal digits.
        """
        ended_ns = time.time_ns()
        begun_ns = ended_ns - round(trace.age_s * 1e9)

        def at(seconds: float) -> int:  # of the monotonic clock; in nanoseconds since 1970
            return begun_ns + round((seconds - trace.begun) * 1e9)

        headers = Headers(scope=scope)
        span = self._tracer.start_span(
            f"{scope['method']} {route}",
            TraceContextTextMapPropagator().extract(headers),
            SpanKind.SERVER,
            _of_http(scope, headers, trace, route, status),
            start_time=begun_ns,
        )
        if status >= 500:
            span.set_status(StatusCode.ERROR, trace.code)
        operation = "chat" if route in CHATS else "text_completion"
        for run, then in zip_longest(trace.submissions, trace.submissions[1:]):
            attributes = _of_generations(trace, run, self._model_name, operation)
            part = self._record_run(span, run, attributes, at)
            part.end(at(then.requests[0].arrived) if then else ended_ns)
        span.end(ended_ns)
        return f"{span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Send what is left, within a few seconds."""
        # In a daemon thread: a collector that does not answer would hold up the exit.
        closing = Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSING_S)

    def _record_run(
        self, parent: Span, run: Submission, attributes: Attributes, at: Callable[[float], int]
    ) -> Span:
        """Return the span of a run, which has not ended, once the phases below it are recorded."""
        arrived = run.requests[0].arrived
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {self._model_name}",
            set_span_in_context(parent),
            attributes=attributes,
            start_time=at(arrived),
        )
        if error := attributes.get("error.type"):
            span.set_status(StatusCode.ERROR, error)
        for i, completion in list(run.ended.items())[:MAX_CHOICES]:
            for name, start_s, end_s, attributes in _phases(completion):
                self._tracer.start_span(
                    name,
                    set_span_in_context(span),
                    attributes={"juice.choice": i, **attributes},
                    start_time=at(arrived + start_s),
                ).end(at(arrived + end_s))
        return span


def _exporter(endpoint: str) -> SpanExporter:
    """Return the exporter; its protocol is that of OpenTelemetry's variable, or fits the URL."""
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
    attributes = {
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
    return _known(attributes)


def _of_generations(trace: Trace, run: Submission, model_name: str, operation: str) -> Attributes:
    options, steering = run.requests[0].options, run.requests[0].steering.report
    completions = run.completions
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "juice",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.choice.count": trace.n_choices if trace.n_choices > 1 else None,
        "gen_ai.request.max_tokens": options.max_tokens,
        "gen_ai.request.temperature": options.temperature,
        "gen_ai.request.top_p": options.top_p,
        "gen_ai.request.top_k": options.top_k or None,
        "gen_ai.request.frequency_penalty": options.frequency_penalty,
        "gen_ai.request.presence_penalty": options.presence_penalty,
        "gen_ai.request.seed": options.seed,
        "gen_ai.request.stop_sequences": options.stop or None,
        "gen_ai.request.stream": trace.is_stream,
        "gen_ai.response.finish_reasons": [c.finish_reason for c in completions] or None,
        "gen_ai.usage.input_tokens": run.n_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(len(c.tokens) for c in completions),
        # The request ended with the error of its last run.
        "error.type": trace.code or None if run is trace.submissions[-1] else None,
        "juice.steer": steering.target,
        "juice.method": steering.method if steering.applied else None,
        "juice.head_set": steering.head_set,
        "juice.strength": steering.strength if steering.applied else None,
    }
    return _known(attributes)


def _phases(completion: Completion) -> Iterator[tuple[str, float, float, Attributes]]:
    """Yield the phases of a generation: name, start and end in seconds, attributes."""
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
