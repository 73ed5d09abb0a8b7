"""The Prometheus metrics, named juice_*.

Labels come from closed sets: routes, statuses, error codes, targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from juice.engine import Completion, Status
from juice.errors import CancelledError, JuiceError, NonFiniteError

LATENCIES_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
)
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
    """The counters of one app, in a registry of its own."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"juice_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"juice_{name}", text, buckets=LATENCIES_S, registry=self.registry)

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
        for reason in REJECTIONS:
            self._rejections.labels(reason)

    def watch(self, status: Callable[[], Status], n_tokenizing: Callable[[], int]) -> None:
        """Add gauges that read the status, and how many texts wait, when scraped."""
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

    def answered(self, route: str, status: int, code: str, steer: str) -> None:
        """Count an answer, and a refusal where its code is one of `REJECTIONS`.

        Args:
            route: The path of the route, or "unmatched".
            status: The HTTP status.
            code: The code of the error answer, empty for a success.
            steer: The target of the request, empty where there is none.
        """
        self._requests.labels(route, str(status), code, steer).inc()
        if code in REJECTIONS:
            self._rejections.labels(code).inc()

    def completed(self, completion: Completion) -> None:
        """Count a generation, its tokens and what a gate decided, and observe its times."""
        times = completion.timing.tokens_s
        self._generated_tokens.inc(len(completion.tokens))
        self._queue.observe(completion.timing.queued_s)
        if times:
            self._first_token.observe(times[0])
        if completion.steering.gate is not None:
            self._gated.labels(str(completion.steering.gate.steers).lower()).inc()
        for before, after in pairwise(times):
            self._inter_token.observe(after - before)

    def read_prompt(self, n_tokens: int) -> None:
        """Count the tokens of a prompt."""
        self._prompt_tokens.inc(n_tokens)

    def failed(self, error: JuiceError) -> None:
        """Count a generation that ended with an error."""
        if isinstance(error, CancelledError):
            self._cancelled.inc()
        if isinstance(error, NonFiniteError):
            self._non_finite.inc()

    def render(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self.registry)
