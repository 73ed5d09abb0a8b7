"""Logs and metrics: what is counted and written, and that it reveals nothing."""

from __future__ import annotations

from typing import Any

import httpx

from tests.support.serving import BEARER, CONFLICT, Server, gauge, serving, within


def test_a_request_id_is_kept_when_it_is_valid_and_made_when_not(server: Server) -> None:
    def answered(sent: str) -> str:
        return httpx.get(f"{server.url}/healthz", headers={"x-request-id": sent}).headers[
            "x-request-id"
        ]

    assert answered("abc-123:4") == "abc-123:4"
    for invalid in ("", "a b", "x" * 200, '{"a":1}'):
        assert answered(invalid).startswith("req-")
    assert httpx.get(f"{server.url}/info").headers["x-request-id"].startswith("req-"), (
        "a refusal has one too"
    )


def test_a_request_is_logged_as_one_json_line_without_its_prompt(server: Server) -> None:
    text = "what nobody else should read"
    sent = {"prompt": text, "steer": "context", "max_tokens": 3, "ignore_eos": True}
    httpx.post(f"{server.url}/generate", json=sent, headers={**BEARER, "x-request-id": "one-line"})
    httpx.post(
        f"{server.url}/generate",
        json={**sent, "temperature": 9},
        headers={**BEARER, "x-request-id": "refused"},
    )

    def lines_by_id() -> dict[str, dict[str, Any]]:
        return {line["id"]: line for line in server.log() if "id" in line}

    within(10, lambda: {"one-line", "refused"} <= set(lines_by_id()), "both are logged")
    lines = lines_by_id()
    assert (
        lines["one-line"].items()
        >= {
            "route": "/generate",
            "method": "POST",
            "status": 200,
            "steer": "context",
            "generated_tokens": 3,
            "finish_reasons": ["length"],
        }.items()
    )
    assert lines["one-line"]["duration_s"] > 0
    assert lines["refused"]["status"] == 400
    assert lines["refused"]["code"] == "invalid_value"
    assert text not in server.errors()


def test_prompts_are_logged_where_that_is_wanted() -> None:
    with serving("--log-prompts", "--log-format", "json") as running:
        bodies = {"/generate": {"prompt": ["one", "two"]}, "/compare": {"prompt": "three"}}
        for route, body in bodies.items():
            sent = {**body, "max_tokens": 1}
            assert httpx.post(running.url + route, json=sent, timeout=60).status_code == 200
        running.stop()  # lines of the log come after answers: now all are there
        logged = {line["route"]: line.get("prompts") for line in running.log() if "route" in line}
    assert logged["/generate"] == ["one", "two"]
    assert logged["/compare"] == ["three"]


def test_the_metrics_count_what_happened(server: Server) -> None:
    def value(name: str) -> float:
        return gauge(server.url, name, **BEARER)

    names = (
        "prompt_tokens_total",
        "generated_tokens_total",
        "queue_time_seconds_count",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
    )
    before = {name: value(name) for name in names}
    answer = httpx.post(
        f"{server.url}/generate",
        json={"prompt": CONFLICT, "max_tokens": 7, "ignore_eos": True, "n": 2},
        headers=BEARER,
    )
    usage = answer.json()["usage"]
    after = {name: value(name) - count for name, count in before.items()}
    assert after == {
        "prompt_tokens_total": usage["prompt_tokens"],
        "generated_tokens_total": 14,
        "queue_time_seconds_count": 2,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 12,
    }
    assert value("engine_up") == 1
    assert value("engine_heartbeat_age_seconds") < 5
    assert (
        value("requests_running")
        == value("requests_waiting")
        == value("kv_cache_occupancy_ratio")
        == 0
    )


def test_labels_come_from_closed_sets_whatever_clients_send(server: Server) -> None:
    for i in range(5):
        httpx.get(f"{server.url}/made-up-{i}", headers=BEARER)
        httpx.get(f"{server.url}/v1/models/made-up-{i}", headers=BEARER)
        httpx.post(
            f"{server.url}/generate", json={"prompt": "x", "steer": f"made-up-{i}"}, headers=BEARER
        )
    text = httpx.get(f"{server.url}/metrics", headers=BEARER).text
    assert "made-up" not in text
    assert 'juice_requests_total{code="not_found",route="unmatched",status="404",steer=""}' in text
    assert 'route="/v1/models/{name:path}"' in text
