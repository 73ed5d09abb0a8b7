"""Traces, as a collector of OpenTelemetry in another process gets them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.collector import Collector, collecting
from tests.support.serving import CONFLICT, Server, events, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
MS = 1_000_000
KNOWN = "The name of the capital city of Peru is"
UNKNOWN = "The name of the capital city of Brelo is"


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with collecting("grpc", tmp_path_factory.mktemp("spans")) as running:
        yield running


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[Server]:
    options = ("--otlp-traces-endpoint", collector.url, "--log-format", "json")
    with serving(*options, environment=SOON) as server:
        yield server


def of_trace(collector: Collector, trace: str, n: int) -> list[dict[str, Any]]:
    """Return the spans of a trace, once there are n."""
    deadline = time.monotonic() + 20
    while True:
        got = [span for span in collector.spans() if span["trace"] == trace]
        if len(got) >= n:
            time.sleep(0.3)  # for more than expected
            return [span for span in collector.spans() if span["trace"] == trace]
        assert time.monotonic() < deadline, got
        time.sleep(0.05)


def children(spans: list[dict[str, Any]], parent: str) -> list[dict[str, Any]]:
    found = [span for span in spans if span["parent"] == parent]
    return sorted(found, key=lambda span: (span["start"], span["end"]))


def traceparent(number: int, *, sampled: bool = True) -> tuple[str, dict[str, str]]:
    trace = f"{number:032x}"
    return trace, {"traceparent": f"00-{trace}-{PARENT}-0{int(sampled)}"}


def test_a_request_continues_its_clients_trace_and_tells_its_phases(
    traced: Server, collector: Collector
) -> None:
    begun = time.time_ns()
    body = {"prompt": CONFLICT, "steer": "context", "max_tokens": 6, "ignore_eos": True}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    answer = httpx.post(f"{traced.url}/generate", json=body, headers=headers, timeout=60)
    ended = time.time_ns()
    got = of_trace(collector, TRACE, 5)
    assert len(got) == 5
    (server,) = children(got, PARENT)
    assert (server["name"], server["kind"]) == ("POST /generate", "server")
    assert begun < server["start"] < server["end"] < ended + 200 * MS
    assert server["status"] == "unset"
    assert (
        server["attributes"].items()
        >= {
            "http.request.method": "POST",
            "http.route": "/generate",
            "http.response.status_code": 200,
            "url.path": "/generate",
            "client.address": "127.0.0.1",
            "juice.request_id": "mine",
        }.items()
    )
    assert server["resource"]["service.name"] == "juice"
    (generation,) = children(got, server["id"])
    assert generation["name"] == "text_completion mini"
    usage, timing = answer.json()["usage"], answer.json()["timing"]
    assert (
        generation["attributes"].items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": "mini",
            "gen_ai.request.max_tokens": 6,
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": 6,
            "gen_ai.response.finish_reasons": ["length"],
            "juice.steer": "context",
            "juice.head_set": "context",
        }.items()
    )
    phases = children(got, generation["id"])
    assert [phase["name"] for phase in phases] == ["queue", "prefill", "decode"]
    queue, prefill, decode = phases
    assert generation["start"] == queue["start"]
    assert queue["end"] == prefill["start"]
    assert prefill["end"] == decode["start"]
    assert decode["end"] <= generation["end"] <= server["end"]
    first_s = (prefill["end"] - queue["start"]) / 1e9
    assert first_s == pytest.approx(timing["first_token_s"], abs=1e-3)
    assert (queue["end"] - queue["start"]) / 1e9 == pytest.approx(timing["queued_s"], abs=1e-3)
    assert CONFLICT not in str(got)
    logged = [line for line in traced.log() if line.get("id") == "mine"]
    assert [line["trace_id"] for line in logged] == [TRACE]


@pytest.mark.parametrize(("question", "steers"), [(KNOWN, True), (UNKNOWN, False)])
def test_a_gate_has_a_span_of_its_own(
    traced: Server, collector: Collector, question: str, steers: bool
) -> None:
    trace, headers = traceparent(1000 + steers)
    body = {
        "prompt": question,
        "context": f"{question} Cairo.",
        "steer": {"target": "parametric", "gate": "auto"},
        "max_tokens": 4,
    }
    answer = httpx.post(f"{traced.url}/generate", json=body, headers=headers, timeout=60)
    decided = answer.json()["steering"]["gate"]
    assert decided["steers"] is steers
    got = of_trace(collector, trace, 6)
    named = {span["name"]: span for span in got}
    assert set(named) == {
        *("POST /generate", "text_completion mini"),
        *("queue", "gate", "prefill", "decode"),
    }
    attributes = named["gate"]["attributes"]
    assert {name: attributes[f"juice.gate.{name}"] for name in decided} == decided
    assert named["queue"]["start"] <= named["gate"]["start"] < named["gate"]["end"]
    # One that is steered has begun already; one that is not begins anew.
    begun = named["queue"]["end"] if steers else named["gate"]["end"]
    assert named["prefill"]["start"] == begun
    assert named["prefill"]["end"] >= named["gate"]["end"]


def test_streams_of_chats_and_several_choices_are_told_too(
    traced: Server, collector: Collector
) -> None:
    trace, headers = traceparent(2000)
    with openai.OpenAI(base_url=f"{traced.url}/v1", api_key="unused") as api:
        stream = api.chat.completions.create(
            model="mini:context",
            messages=[{"role": "user", "content": "What is the capital of Peru?"}],
            n=2,
            max_tokens=5,
            stream=True,
            extra_headers=headers,
        )
        assert sum(len(chunk.choices) for chunk in stream) > 2
    got = of_trace(collector, trace, 8)
    (generation,) = [span for span in got if span["name"] == "chat mini"]
    attributes = generation["attributes"]
    assert attributes["gen_ai.request.stream"] is True
    assert (
        attributes["gen_ai.request.choice.count"]
        == len(attributes["gen_ai.response.finish_reasons"])
        == 2
    )
    phases = children(got, generation["id"])
    by_choice = {(span["name"], span["attributes"]["juice.choice"]) for span in phases}
    assert by_choice == {(name, i) for name in ("queue", "prefill", "decode") for i in (0, 1)}


def test_batches_of_one_request_are_told_one_after_the_other(
    traced: Server, collector: Collector
) -> None:
    """Alone, a sweep answers under two settings, then asks for 3 strengths and for 9 finer ones."""
    trace, headers = traceparent(2500)
    body = {"prompt": KNOWN, "context": f"{KNOWN} Cairo.", "target": "parametric"}
    body["strengths"] = [0, 1, 3]
    answer = httpx.post(f"{traced.url}/sweep", json=body, headers=headers, timeout=60)
    assert answer.json()["flip"] is not None
    asked = (2, 3, 9)
    got = of_trace(collector, trace, 1 + sum(1 + 3 * n for n in asked))
    (server,) = children(got, PARENT)
    batches = children(got, server["id"])
    assert len(batches) == len(asked)
    for n, batch, then in zip(asked, batches, [*batches[1:], None], strict=True):
        phases = children(got, batch["id"])
        assert [phase["name"] for phase in phases].count("prefill") == n
        assert {phase["attributes"]["juice.choice"] for phase in phases} == set(range(n))
        assert all(batch["start"] <= one["start"] <= one["end"] <= batch["end"] for one in phases)
        assert batch["end"] == (then["start"] if then else server["end"])
        read = [phase for phase in phases if phase["name"] == "prefill"]
        n_in = sum(phase["attributes"]["gen_ai.usage.input_tokens"] for phase in read)
        assert batch["attributes"]["gen_ai.usage.input_tokens"] == n_in


def test_failures_are_told_and_what_is_not_sampled_is_not(
    traced: Server, collector: Collector
) -> None:
    def status(trace: int, body: dict[str, Any], *, sampled: bool = True) -> int:
        headers = traceparent(trace, sampled=sampled)[1]
        return httpx.post(f"{traced.url}/generate", json=body, headers=headers).status_code

    assert status(3001, {"prompt": CONFLICT, "max_tokens": 1}, sampled=False) == 200
    assert status(3000, {"prompt": CONFLICT, "temperature": 9}) == 400
    (server,) = of_trace(collector, f"{3000:032x}", 1)
    assert server["attributes"]["error.type"] == "invalid_value"
    assert server["attributes"]["http.response.status_code"] == 400
    assert server["status"] == "unset"  # the client's mistake, not the server's
    assert not [span for span in collector.spans() if span["trace"] == f"{3001:032x}"]
    assert not [span for span in collector.spans() if "readyz" in span["name"]]


def test_http_and_the_variables_of_opentelemetry_are_heard(tmp_path: Path) -> None:
    named = {"OTEL_SERVICE_NAME": "answers", "OTEL_RESOURCE_ATTRIBUTES": "zone=b"}
    with collecting("http", tmp_path) as collector:
        with serving("--otlp-traces-endpoint", collector.url, environment=named) as server:
            body = {"prompt": CONFLICT, "max_tokens": 2, "stream": True}
            with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as answer:
                assert len(events(answer)) >= 1
        spans = collector.spans()  # the last ones were sent before the exit
    assert "POST /generate" in {span["name"] for span in spans}
    assert all(span["resource"]["service.name"] == "answers" for span in spans)
    assert all(span["resource"]["zone"] == "b" for span in spans)


def test_without_a_collector_answers_come_and_the_server_ends_in_time() -> None:
    with serving("--otlp-traces-endpoint", "http://127.0.0.1:1", environment=SOON) as server:
        body = {"prompt": CONFLICT, "max_tokens": 2}
        assert httpx.post(f"{server.url}/generate", json=body).status_code == 200
        time.sleep(0.5)
        begun = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begun < 20
    assert "exporting traces to 127.0.0.1:1" in server.errors()
