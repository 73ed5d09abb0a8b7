"""The Prometheus metrics, named juice_*; those under vLLM's names are kept beside them.

Labels come from closed sets: routes, statuses, error codes, targets, names of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import juice
from juice.engine import Completion, Engine, Status
from juice.errors import CancelledError, JuiceError, NonFiniteError
from juice_server.telemetry.buckets import BATCH_SIZES, LATENCIES_S, TOKENS
from juice_server.telemetry.vllm_names import VllmNames
from juice_server.trace import Run, Trace

Change = Literal["added", "changed", "removed"]
# Codes of refusals for the server's limits, state or keys, not for a mistake in the request.
REJECTIONS = (
    "queue_full",
    "rate_limit_exceeded",
    "permission_denied",
    "not_ready",
    "timeout",
    "invalid_api_key",
    "body_too_large",
    "body_timeout",
    "context_length_exceeded",
)


class Metrics:
    """The counters of one app, in a registry of its own.

    Args:
        model_name: What clients call the model.
    """

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._under_vllms_names = VllmNames(self.registry, model_name)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"juice_{name}", text, labels, registry=self.registry)

        def histogram(
            name: str, text: str, *labels: str, buckets: Sequence[float] = LATENCIES_S
        ) -> Histogram:
            return Histogram(f"juice_{name}", text, labels, buckets=buckets, registry=self.registry)

        self._requests = counter(
            "requests", "HTTP requests answered.", "route", "status", "code", "steer"
        )
        self._rejections = counter("rejections", "Requests that were refused.", "reason")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens.")
        self._generated_tokens = counter("generated_tokens", "Generated tokens.")
        self._cancelled = counter(
            "cancelled", "Generations cancelled because nobody was waiting for them."
        )
        self._gated = counter(
            "gated", "Generations that a gate decided about, by whether it steered them.", "steers"
        )
        self._non_finite = counter(
            "non_finite_logits", "Generations that ended because their logits were not finite."
        )
        self._first_token = histogram(
            "time_to_first_token_seconds",
            "From a request's arrival in the queue to its first token.",
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Between a generation's tokens."
        )
        self._queue = histogram(
            "queue_time_seconds", "From a request's arrival in the queue to its start."
        )
        self._duration = histogram(
            "request_duration_seconds",
            "From a request's arrival to the end of its answer.",
            "route",
        )
        self._tokens_in = histogram(
            "prompt_length_tokens", "Tokens of a generation's prompt.", buckets=TOKENS
        )
        self._tokens_out = histogram(
            "generation_length_tokens", "Tokens that a generation made.", buckets=TOKENS
        )
        self._key_requests = counter("key_requests", "Requests with a key.", "key")
        self._key_tokens = counter(
            "key_tokens", "Tokens of requests with a key: prompt or generated.", "key", "kind"
        )
        self._head_sets = counter(
            "head_set_changes", "Head sets that were added, changed or removed.", "change"
        )
        Info("juice_build", "The server.", registry=self.registry).info(
            {"version": juice.__version__}
        )
        for reason in REJECTIONS:
            self._rejections.labels(reason)
        for change in get_args(Change):
            self._head_sets.labels(change)

    def watch(
        self, engine: Engine, status: Callable[[], Status], n_tokenizing: Callable[[], int]
    ) -> None:
        """Say which model is served, and read the rest when scraped.

        Args:
            engine: Runs the model.
            status: Returns its state, with what waits before it.
            n_tokenizing: Returns how many texts wait to be tokenized.
        """
        own = engine.description
        Info("juice_model", "The model.", registry=self.registry).info(
            {
                "model": self._model_name,
                "architecture": own.identity.architecture,
                "fingerprint": own.identity.fingerprint or "",
                "engine": engine.name,
                "dtype": own.dtype,
                "quantization": own.quantization or "none",
                "device": own.device,
            }
        )
        self._under_vllms_names.watch(status)
        self.registry.register(_Steps(status))
        gauges: Sequence[tuple[str, str, Callable[[Status], float]]] = (
            ("requests_running", "Generations in the batch.", lambda s: s.n_running),
            ("requests_waiting", "Generations in the queue.", lambda s: s.n_waiting),
            (
                "engine_heartbeat_age_seconds",
                "Time since the engine last began a step.",
                lambda s: s.heartbeat_age_s,
            ),
            ("engine_up", "Whether the engine's thread is alive.", lambda s: float(s.is_alive)),
            (
                "kv_cache_occupancy_ratio",
                "Reserved share of the memory for keys and values.",
                lambda s: s.n_kv_bytes / s.max_kv_bytes,
            ),
        )
        for name, text, value in gauges:
            gauge = Gauge(f"juice_{name}", text, registry=self.registry)
            gauge.set_function(lambda value=value: value(status()))  # type: ignore[misc]
        waiting = Gauge(
            "juice_requests_waiting_to_be_tokenized",
            "Requests whose texts wait to be tokenized.",
            registry=self.registry,
        )
        waiting.set_function(n_tokenizing)

    def answered(self, route: str, status: int, trace: Trace) -> None:
        """Count an answer, and a refusal where its code is one of `REJECTIONS`.

        Args:
            route: The path of the route, or "unmatched".
            status: The HTTP status.
            trace: What was recorded of the request.
        """
        self._requests.labels(route, str(status), trace.code, trace.steer).inc()
        self._duration.labels(route).observe(trace.age_s)
        self._under_vllms_names.answered(trace)
        if trace.code in REJECTIONS:
            self._rejections.labels(trace.code).inc()
        if trace.client.has_key:
            self._key_requests.labels(trace.client.name).inc()

    def completed(self, completion: Completion, trace: Trace, run: Run) -> None:
        """Count a generation, its tokens and what a gate decided, and observe its times."""
        times, n_new = completion.timing.tokens_s, len(completion.tokens)
        self._generated_tokens.inc(n_new)
        self._tokens_in.observe(completion.n_prompt_tokens)
        self._tokens_out.observe(n_new)
        if trace.client.has_key:
            self._key_tokens.labels(trace.client.name, "generated").inc(n_new)
        self._under_vllms_names.completed(completion, run.submitted - trace.begun)
        self._queue.observe(completion.timing.queued_s)
        if times:
            self._first_token.observe(times[0])
        if completion.steering.gate is not None:
            self._gated.labels(str(completion.steering.gate.steers).lower()).inc()
        for before, after in pairwise(times):
            self._inter_token.observe(after - before)

    def read_prompts(self, run: Run, trace: Trace) -> None:
        """Count the tokens of prompts that were submitted."""
        self._prompt_tokens.inc(run.n_prompt_tokens)
        if trace.client.has_key:
            self._key_tokens.labels(trace.client.name, "prompt").inc(run.n_prompt_tokens)
        self._under_vllms_names.read_prompts(run.n_prompt_tokens)

    def failed(self, error: JuiceError) -> None:
        """Count a generation that ended with an error."""
        self._under_vllms_names.failed(error)
        if isinstance(error, CancelledError):
            self._cancelled.inc()
        if isinstance(error, NonFiniteError):
            self._non_finite.inc()

    def head_set_changed(self, change: Change) -> None:
        """Count a head set that is served now, or no longer, or is another one."""
        self._head_sets.labels(change).inc()

    def render(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self.registry)


class _Steps(Collector):
    """The engine's steps, and how many generations were in them."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Any]:
        status = self._status()
        for name, text, value in (
            ("juice_steps", "Steps of the engine.", status.n_steps),
            ("juice_step_generations", "Generations in them, added up.", status.n_step_requests),
        ):
            yield CounterMetricFamily(name, text, value=value)
        bounds = (*BATCH_SIZES, math.inf)
        within = [sum(n for size, n in status.steps.items() if size <= most) for most in bounds]
        yield HistogramMetricFamily(
            "juice_batch_size",
            "Generations in a step of the engine.",
            buckets=[
                (floatToGoString(most), n)  # type: ignore[no-untyped-call]
                for most, n in zip(bounds, within, strict=True)
            ],
            sum_value=status.n_step_requests,
        )
