"""Metrics under the names that vLLM has, so that dashboards and autoscalers made for it work.

Each means here what it means there. What this server has no equivalent of is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from juice.engine import Completion, Status
from juice.errors import CancelledError, JuiceError
from juice_server.telemetry.buckets import LATENCIES_S, TOKENS
from juice_server.trace import Trace

LABELS = ("model_name", "engine")
GAUGES: tuple[tuple[str, str, Callable[[Status], float]], ...] = (
    ("num_requests_running", "Generations in the batch.", lambda s: s.n_running),
    ("num_requests_waiting", "Generations in the queue.", lambda s: s.n_waiting),
    (
        "kv_cache_usage_perc",
        "Reserved share of the memory for keys and values, 0 to 1.",
        lambda s: s.n_kv_bytes / s.max_kv_bytes,
    ),
)


class VllmNames:
    """What is counted of generations, as vLLM counts it.

    Args:
        registry: Where they are registered.
        model_name: What clients call the model.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry, self._labels = registry, (model_name, "0")

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*LABELS, *labels), registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float] = LATENCIES_S) -> Histogram:
            own = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=registry)
            return own.labels(*self._labels)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens.").labels(*self._labels)
        self._new_tokens = counter("generation_tokens", "Generated tokens.").labels(*self._labels)
        self._ended = counter("request_success", "Generations that ended.", "finished_reason")
        self._lengths = {
            name: histogram(name, text, TOKENS)
            for name, text in (
                ("request_prompt_tokens", "Tokens of a prompt."),
                ("request_generation_tokens", "Tokens that a generation made."),
                ("request_max_num_generation_tokens", "Tokens of a request's longest answer."),
                ("request_params_max_tokens", "The most new tokens that a request asks for."),
                ("request_params_n", "Choices that a request asks for."),
            )
        }
        self._times = {
            name: histogram(f"{name}_seconds", text)
            for name, text in (
                ("e2e_request_latency", "From a request's arrival to its last token."),
                ("time_to_first_token", "From a request's arrival to its first token."),
                ("inter_token_latency", "Between a generation's tokens."),
                ("request_time_per_output_token", "Between them on average, once a generation."),
                ("request_queue_time", "From a generation's arrival in the queue to its start."),
                ("request_prefill_time", "From a generation's start to its first token."),
                ("request_decode_time", "From a generation's first token to its last."),
                ("request_inference_time", "From a generation's start to its last token."),
            )
        }

    def watch(self, status: Callable[[], Status]) -> None:
        """Read the engine's state when scraped."""
        for name, text, value in GAUGES:
            gauge = Gauge(f"vllm:{name}", text, LABELS, registry=self._registry)
            gauge.labels(*self._labels).set_function(lambda value=value: value(status()))  # type: ignore[misc]

    def read_prompts(self, n_tokens: int) -> None:
        """Count the tokens of prompts that were submitted."""
        self._prompt_tokens.inc(n_tokens)

    def completed(self, completion: Completion, before_s: float) -> None:
        """Count a generation and observe its lengths and times.

        Args:
            completion: What came of it.
            before_s: How long before its submission its request had arrived, in seconds.
        """
        n_new, times = len(completion.tokens), completion.timing.tokens_s
        self._new_tokens.inc(n_new)
        self._ended.labels(*self._labels, completion.finish_reason).inc()
        self._lengths["request_prompt_tokens"].observe(completion.n_prompt_tokens)
        self._lengths["request_generation_tokens"].observe(n_new)
        start_s = completion.timing.queued_s
        self._times["request_queue_time"].observe(start_s)
        if not times:
            return
        decode_s = times[-1] - times[0]
        for name, seconds in (
            ("e2e_request_latency", before_s + times[-1]),
            ("time_to_first_token", before_s + times[0]),
            ("request_prefill_time", times[0] - start_s),
            ("request_decode_time", decode_s),
            ("request_inference_time", times[-1] - start_s),
        ):
            self._times[name].observe(seconds)
        if n_new > 1:
            self._times["request_time_per_output_token"].observe(decode_s / (n_new - 1))
        for before, after in pairwise(times):
            self._times["inter_token_latency"].observe(after - before)

    def answered(self, trace: Trace) -> None:
        """Observe what a request asked for and got, once for all of its choices."""
        if not trace.completions:
            return
        asked = [own for run in trace.runs for own in run.requests]
        longest = max(len(own.tokens) for own in trace.completions)
        for name, value in (
            ("request_max_num_generation_tokens", longest),
            ("request_params_max_tokens", max(own.max_tokens for own in asked)),
            ("request_params_n", trace.n_choices),
        ):
            self._lengths[name].observe(value)

    def failed(self, error: JuiceError) -> None:
        """Count a generation that ended with an error."""
        reason = "abort" if isinstance(error, CancelledError) else "error"
        self._ended.labels(*self._labels, reason).inc()
