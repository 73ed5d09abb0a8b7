"""Metrics against what a client measures: lengths, times, keys, batches, under both names."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.serving import BEARER, CONFLICT, Server, raw_post, within


def samples(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the value of each series, by its name and labels."""
    text = httpx.get(f"{server.url}/metrics", headers=BEARER).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


PROMPT = {"juice_key_tokens": {"kind": "prompt"}}


class Growth:
    """How much series have grown since this was made."""

    def __init__(self, server: Server) -> None:
        self._server, self._before = server, samples(server)

    def __call__(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {
            name: value - self._before.get(name, 0) for name, value in samples(self._server).items()
        }


def total(grown: dict[Any, float], name: str, **labels: str) -> float:
    return sum(
        value
        for (series, has), value in grown.items()
        if series == name and has >= frozenset(labels.items())
    )


def ask(server: Server, **body: Any) -> tuple[dict[str, Any], float]:
    sent = {"prompt": CONFLICT, "ignore_eos": True, **body}
    begun = time.monotonic()
    answer = httpx.post(f"{server.url}/generate", json=sent, headers=BEARER, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json(), time.monotonic() - begun


def test_lengths_and_times_are_those_of_the_request(server: Server) -> None:
    growth = Growth(server)
    answer, took_s = ask(server, max_tokens=12)
    grown, n_in = growth(), answer["usage"]["prompt_tokens"]
    for name, value in (
        ("juice_prompt_length_tokens_sum", n_in),
        ("juice_generation_length_tokens_sum", 12),
        ("vllm:prompt_tokens_total", n_in),
        ("vllm:generation_tokens_total", 12),
        ("vllm:request_prompt_tokens_sum", n_in),
        ("vllm:request_generation_tokens_sum", 12),
        ("vllm:request_max_num_generation_tokens_sum", 12),
        ("vllm:request_params_max_tokens_sum", 12),
        ("vllm:request_params_n_sum", 1),
        ("vllm:inter_token_latency_seconds_count", 11),
    ):
        assert total(grown, name) == value, name
    assert total(grown, "vllm:request_success_total", finished_reason="length") == 1

    def seconds(name: str) -> float:
        assert total(grown, f"vllm:{name}_seconds_count") == 1, name
        return total(grown, f"vllm:{name}_seconds_sum")

    first_s = seconds("time_to_first_token")
    decode_s, prefill_s = seconds("request_decode_time"), seconds("request_prefill_time")
    end_s, queue_s = seconds("e2e_request_latency"), seconds("request_queue_time")
    assert 0 <= queue_s < first_s < end_s < took_s
    assert end_s == pytest.approx(first_s + decode_s)
    assert seconds("request_inference_time") == pytest.approx(prefill_s + decode_s)
    assert seconds("request_time_per_output_token") == pytest.approx(decode_s / 11)
    timing = answer["timing"]
    assert queue_s + prefill_s == pytest.approx(timing["first_token_s"], abs=1e-3)
    duration_s = total(grown, "juice_request_duration_seconds_sum", route="/generate")
    assert end_s < duration_s < took_s


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_client_that_leaves_are_counted_once_and_logged(
    server: Server, stream: bool
) -> None:
    growth, name = Growth(server), f"leaves-{stream}"
    body = {"prompt": CONFLICT, "max_tokens": 480, "ignore_eos": True, "n": 2, "stream": stream}
    headers = {**BEARER, "x-request-id": name}

    def line() -> dict[str, Any]:
        return next((each for each in server.log() if each.get("id") == name), {})

    asked = raw_post(body).replace(
        b"\r\n", "".join(f"\r\n{k}: {v}" for k, v in headers.items()).encode() + b"\r\n", 1
    )
    with server.connect() as connection:
        connection.sendall(asked)
        within(20, lambda: total(growth(), "juice_step_generations_total") >= 20, "it runs")
    within(20, lambda: bool(line()), "it is logged")
    grown, logged = growth(), line()
    assert (logged["status"], logged["code"]) == (200 if stream else 499, "client_gone")
    n = logged["generated_tokens"]
    assert 0 < n < 960, "it did not run to its end"
    assert total(grown, "juice_generated_tokens_total") == n
    assert total(grown, "vllm:generation_tokens_total") == n
    assert total(grown, "juice_key_tokens_total", kind="generated") == n


def test_choices_of_a_request_are_generations_of_their_own(server: Server) -> None:
    growth = Growth(server)
    ask(server, max_tokens=3, n=4)
    grown = growth()
    assert total(grown, "juice_generation_length_tokens_count") == 4
    assert total(grown, "vllm:request_generation_tokens_count") == 4
    assert total(grown, "vllm:request_params_n_sum") == 4
    assert total(grown, "vllm:request_params_n_count") == 1


def test_every_prompt_of_a_request_counts(server: Server) -> None:
    growth = Growth(server)
    body = {"prompt": CONFLICT, "target": "context", "strengths": [0, 1, 3]}
    answer = httpx.post(f"{server.url}/sweep", json=body, headers=BEARER, timeout=60)
    assert answer.status_code == 200, answer.text
    grown = growth()
    n_in = total(grown, "juice_prompt_length_tokens_sum")
    assert total(grown, "juice_prompt_length_tokens_count") >= 5
    assert total(grown, "juice_requests_total", status="200", steer="context") == 1
    for name in ("juice_prompt_tokens", "juice_key_tokens", "vllm:prompt_tokens"):
        assert total(grown, f"{name}_total", **PROMPT.get(name, {})) == n_in, name


def test_what_is_refused_counts_for_its_target(server: Server) -> None:
    growth = Growth(server)
    body = {"prompt": CONFLICT, "steer": "context", "max_tokens": 100_000}
    assert httpx.post(f"{server.url}/generate", json=body, headers=BEARER).status_code == 400
    assert total(growth(), "juice_requests_total", status="400", steer="context") == 1


def test_keys_are_counted_by_their_names(server: Server) -> None:
    growth = Growth(server)
    answer, _ = ask(server, max_tokens=5)
    httpx.post(f"{server.url}/generate", json={"prompt": 3}, headers=BEARER)
    httpx.post(f"{server.url}/generate", json={"prompt": CONFLICT})
    grown = growth()
    named = {
        dict(labels)["key"]: value
        for (name, labels), value in grown.items()
        if name == "juice_key_requests_total" and value
    }
    assert len(named) == 1
    (key,) = named
    assert named[key] == 3  # and one to /metrics
    assert total(grown, "juice_key_tokens_total", key=key, kind="generated") == 5
    n_in = answer["usage"]["prompt_tokens"]
    assert total(grown, "juice_key_tokens_total", key=key, kind="prompt") == n_in


def test_the_mean_batch_is_that_of_the_steps(server: Server) -> None:
    growth = Growth(server)
    ask(server, max_tokens=20)
    alone = growth()
    assert total(alone, "juice_steps_total") == total(alone, "juice_step_generations_total") == 20
    growth = Growth(server)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: ask(server, max_tokens=100), range(4)))
    together = growth()
    assert total(together, "juice_step_generations_total") == 400
    assert 100 <= total(together, "juice_steps_total") < 300
    for grown, most in ((alone, "1.0"), (together, "4.0")):
        n_steps = total(grown, "juice_steps_total")
        assert total(grown, "juice_batch_size_count") == n_steps
        assert total(grown, "juice_batch_size_sum") == total(grown, "juice_step_generations_total")
        assert total(grown, "juice_batch_size_bucket", le=most) == n_steps
    assert total(together, "juice_batch_size_bucket", le="1.0") < total(
        together, "juice_batch_size_count"
    )


def test_it_says_what_is_served(server: Server) -> None:
    info = httpx.get(f"{server.url}/info", headers=BEARER).json()
    labels = {name: dict(pairs) for name, pairs in samples(server)}
    assert labels["juice_build_info"] == {"version": info["version"]}
    model = labels["juice_model_info"]
    assert model["model"] == info["model"]["name"] == "mini"
    assert (model["engine"], model["dtype"]) == (info["engine"]["name"], info["model"]["dtype"])
    assert model["fingerprint"] == info["model"]["fingerprint"]
    assert labels["vllm:num_requests_running"] == {"model_name": "mini", "engine": "0"}
