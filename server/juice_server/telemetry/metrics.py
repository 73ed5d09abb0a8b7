"""The Prometheus metrics, named juice_*, and beside them those that vLLM has, under its names.

Each name of vLLM's means what it means there, so that dashboards and autoscalers made for it find
what they read. Labels come from closed sets: routes, statuses, error codes, targets, names of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import juice
from juice.engine.answer import Completion
from juice.engine.contract import Engine, Status
from juice.engine.request import Request
from juice.errors import CancelledError, JuiceError, NonFiniteError
from juice_server.trace import Submission, Trace

# The upper bounds of the histograms' buckets: seconds, generations, tokens.
LATENCIES_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 120, 300),
)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

# A row has the name, or both names with a space between them; the help; and labels.
# The code calls a metric by its first name, and writes it under both.
Rows = tuple[tuple[str, ...], ...]
COUNTERS: Rows = (
    ("juice_requests", "HTTP requests answered.", "route", "status", "code", "steer"),
    ("juice_rejections", "Requests that were refused.", "reason"),
    ("juice_prompt_tokens vllm:prompt_tokens", "Prompt tokens."),
    ("juice_generated_tokens vllm:generation_tokens", "Generated tokens."),
    ("juice_cancelled", "Generations cancelled because nobody was waiting for them."),
    ("juice_gated", "Generations that a gate decided about, by whether it steered them.", "steers"),
    ("juice_non_finite_logits", "Generations that ended because their logits were not finite."),
    ("juice_key_requests", "Requests with a key.", "key"),
    ("juice_key_tokens", "Tokens of requests with a key: prompt or generated.", "key", "kind"),
    ("juice_head_set_changes", "Head sets that were added, changed or removed.", "change"),
    ("vllm:request_success", "Generations that ended.", "finished_reason"),
)
TIMES: Rows = (
    (
        "juice_request_duration_seconds",
        "From a request's arrival to the end of its answer.",
        "route",
    ),
    (
        "juice_time_to_first_token_seconds",
        "From a request's arrival in the queue to its first token.",
    ),
    ("vllm:time_to_first_token_seconds", "From a request's arrival to its first token."),
    ("vllm:e2e_request_latency_seconds", "From a request's arrival to its last token."),
    (
        "juice_inter_token_latency_seconds vllm:inter_token_latency_seconds",
        "Between a generation's tokens.",
    ),
    ("vllm:request_time_per_output_token_seconds", "Between them on average, once a generation."),
    (
        "juice_queue_time_seconds vllm:request_queue_time_seconds",
        "From a generation's arrival in the queue to its start.",
    ),
    ("vllm:request_prefill_time_seconds", "From a generation's start to its first token."),
    ("vllm:request_decode_time_seconds", "From a generation's first token to its last."),
    ("vllm:request_inference_time_seconds", "From a generation's start to its last token."),
)
LENGTHS: Rows = (
    ("juice_prompt_length_tokens vllm:request_prompt_tokens", "Tokens of a generation's prompt."),
    (
        "juice_generation_length_tokens vllm:request_generation_tokens",
        "Tokens that a generation made.",
    ),
    ("vllm:request_max_num_generation_tokens", "Tokens of a request's longest answer."),
    ("vllm:request_params_max_tokens", "The most new tokens that a request asks for."),
    ("vllm:request_params_n", "Choices that a request asks for."),
)
GAUGES: Rows = (
    ("juice_requests_running vllm:num_requests_running", "Generations in the batch."),
    ("juice_requests_waiting vllm:num_requests_waiting", "Generations in the queue."),
    (
        "juice_kv_cache_occupancy_ratio vllm:kv_cache_usage_perc",
        "Reserved share of the memory for keys and values, 0 to 1.",
    ),
    ("juice_engine_heartbeat_age_seconds", "Time since the engine last began a step or a layer."),
    ("juice_engine_up", "Whether the engine's thread is alive."),
    ("juice_requests_waiting_to_be_tokenized", "Requests whose texts wait to be tokenized."),
)

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
    "too_many_connections",
)


class Metrics:
    """The metrics of one app, whose clients call the model by this name."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        # By its first name, a metric under each of its names, with vLLM's labels where it has them.
        self._metrics: dict[str, list[tuple[Any, tuple[str, ...]]]] = {}
        for row in COUNTERS:
            self._declare(Counter, *row)
        for row in TIMES:
            self._declare(Histogram, *row, buckets=LATENCIES_S)
        for row in LENGTHS:
            self._declare(Histogram, *row, buckets=TOKENS)
        Info("juice_build", "The server.", registry=self.registry).info(
            {"version": juice.__version__}
        )
        for reason in REJECTIONS:
            self._series("juice_rejections", reason)
        for change in get_args(Change):
            self._series("juice_head_set_changes", change)

    def _declare(
        self, kind: type[Any], names: str, text: str, *labels: str, **options: Any
    ) -> None:
        """Register a metric under its names; one without labels is there from now on."""
        first = names.split()[0]
        self._metrics[first] = []
        for name in names.split():
            shared = _shared(name, self._model_name)
            metric = kind(name, text, (*shared, *labels), registry=self.registry, **options)
            self._metrics[first].append((metric, tuple(shared.values())))
        if not labels:
            self._series(first)

    def _series(self, name: str, *labels: str) -> list[Any]:
        """Return the series of a metric with these labels, one for each of its names."""
        return [
            metric.labels(*shared, *labels) if shared or labels else metric
            for metric, shared in self._metrics[name]
        ]

    def _count(self, name: str, *labels: str, n: int = 1) -> None:
        for series in self._series(name, *labels):
            series.inc(n)

    def _observe(self, name: str, *values: float, labels: tuple[str, ...] = ()) -> None:
        for series in self._series(name, *labels):
            for value in values:
                series.observe(value)

    def watch(
        self, engine: Engine, status: Callable[[], Status], n_tokenizing: Callable[[], int]
    ) -> None:
        """Say which model is served, and read its state, with what waits, when scraped."""
        served = engine.description
        facts = {
            "model": self._model_name,
            "architecture": served.identity.architecture,
            "fingerprint": served.identity.fingerprint or "",
            "engine": engine.name,
            "dtype": served.dtype,
            "quantization": served.quantization or "none",
            "device": served.device,
        }
        Info("juice_model", "The model.", registry=self.registry).info(facts)
        self.registry.register(_EngineState(status, n_tokenizing, self._model_name))

    def answered(self, route: str, status: int, trace: Trace) -> None:
        """Count an answer of a route, or "unmatched"; a refusal by its code in `REJECTIONS`."""
        self._count("juice_requests", route, str(status), trace.code, trace.steer)
        self._observe("juice_request_duration_seconds", trace.age_s, labels=(route,))
        if trace.code in REJECTIONS:
            self.rejected(trace.code)
        if trace.client.has_key:
            self._count("juice_key_requests", trace.client.name)
        if completions := trace.completions:
            # Once for all choices of the request.
            longest = max(len(completion.tokens) for completion in completions)
            most = max(request.options.max_tokens for request in trace.requests)
            self._observe("vllm:request_max_num_generation_tokens", longest)
            self._observe("vllm:request_params_max_tokens", most)
            self._observe("vllm:request_params_n", trace.n_choices)

    def rejected(self, reason: str) -> None:
        """Count a refusal; a connection's has no request."""
        self._count("juice_rejections", reason)

    def completed(self, completion: Completion, request: Request, trace: Trace) -> None:
        """Count a generation, its tokens and its gate's decision, and observe its times."""
        times_s, n_new = completion.timing.tokens_s, len(completion.tokens)
        start_s = completion.timing.queued_s
        self.generated(n_new, trace)
        self._count("vllm:request_success", completion.finish_reason)
        if completion.steering.gate is not None:
            self._count("juice_gated", str(completion.steering.gate.steers).lower())
        self._observe("juice_prompt_length_tokens", completion.n_prompt_tokens)
        self._observe("juice_generation_length_tokens", n_new)
        self._observe("juice_queue_time_seconds", start_s)
        if not times_s:
            return
        first_s, last_s = times_s[0], times_s[-1]
        before_s = request.arrived - trace.begun  # between the arrivals here and in the queue
        self._observe("juice_time_to_first_token_seconds", first_s)
        self._observe("vllm:time_to_first_token_seconds", before_s + first_s)
        self._observe("vllm:e2e_request_latency_seconds", before_s + last_s)
        self._observe("vllm:request_prefill_time_seconds", first_s - start_s)
        self._observe("vllm:request_decode_time_seconds", last_s - first_s)
        self._observe("vllm:request_inference_time_seconds", last_s - start_s)
        if n_new > 1:
            each_s = (last_s - first_s) / (n_new - 1)
            self._observe("vllm:request_time_per_output_token_seconds", each_s)
        gaps_s = (after - before for before, after in pairwise(times_s))
        self._observe("juice_inter_token_latency_seconds", *gaps_s)

    def generated(self, n_tokens: int, trace: Trace) -> None:
        """Count new tokens, of generations that ended or were abandoned."""
        self._count("juice_generated_tokens", n=n_tokens)
        if trace.client.has_key:
            self._count("juice_key_tokens", trace.client.name, "generated", n=n_tokens)

    def read_prompts(self, submission: Submission, trace: Trace) -> None:
        """Count the tokens of prompts that were submitted."""
        self._count("juice_prompt_tokens", n=submission.n_prompt_tokens)
        if trace.client.has_key:
            n_tokens = submission.n_prompt_tokens
            self._count("juice_key_tokens", trace.client.name, "prompt", n=n_tokens)

    def failed(self, error: JuiceError) -> None:
        """Count a generation that ended with an error."""
        is_cancelled = isinstance(error, CancelledError)
        self._count("vllm:request_success", "abort" if is_cancelled else "error")
        if is_cancelled:
            self._count("juice_cancelled")
        if isinstance(error, NonFiniteError):
            self._count("juice_non_finite_logits")

    def head_set_changed(self, change: Change) -> None:
        """Count a head set that is served now, or no longer, or is another one."""
        self._count("juice_head_set_changes", change)

    def render(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self.registry)


def _shared(name: str, model_name: str) -> dict[str, str]:
    """Return the labels that all metrics of vLLM's have."""
    return {"model_name": model_name, "engine": "0"} if name.startswith("vllm:") else {}


class _EngineState(Collector):
    """The state of the engine, and the steps that it has made."""

    def __init__(
        self, status: Callable[[], Status], n_tokenizing: Callable[[], int], model_name: str
    ) -> None:
        self._status, self._n_tokenizing, self._model_name = status, n_tokenizing, model_name

    def collect(self) -> Iterator[Any]:
        status = self._status()
        values: dict[str, float] = {
            "juice_requests_running": status.n_running,
            "juice_requests_waiting": status.n_waiting,
            "juice_kv_cache_occupancy_ratio": status.n_kv_bytes / status.max_kv_bytes,
            "juice_engine_heartbeat_age_seconds": status.heartbeat_age_s,
            "juice_engine_up": status.is_alive,
            "juice_requests_waiting_to_be_tokenized": self._n_tokenizing(),
        }
        for names, text in GAUGES:
            first, *_ = each = names.split()
            for name in each:
                shared = _shared(name, self._model_name)
                gauge = GaugeMetricFamily(name, text, labels=[*shared])
                gauge.add_metric([*shared.values()], values[first])
                yield gauge
        yield CounterMetricFamily("juice_steps", "Steps of the engine.", status.n_steps)
        yield CounterMetricFamily(
            "juice_step_generations", "Generations in them, added up.", status.n_step_requests
        )
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
