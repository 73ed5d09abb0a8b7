"""The server as a process, over real HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import juice

CONFLICT = "The name of the capital city of Peru is Oslo. The name of the capital city of Peru is"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    port = free_port()
    command = [sys.executable, "-m", "juice.cli.main", "serve", "--port", str(port), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return process, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    process, url = start()
    with httpx.Client(base_url=url, timeout=60) as client:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if client.get("/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        else:
            process.kill()
            pytest.fail(f"the server did not become ready: {process.communicate()[1]}")
        yield client
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM)
    assert "Traceback" not in errors


def test_each_request_is_steered_as_it_asks(server: httpx.Client) -> None:
    texts = {}
    for steer in ("none", "context", "parametric"):
        answer = server.post("/generate", json={"prompt": CONFLICT, "steer": steer, "max_tokens": 4}).json()
        assert answer["steering"]["applied"] == (steer != "none")
        assert answer["steering"]["target"] == steer
        texts[steer] = answer["text"]
    assert texts["context"].startswith(" Oslo")
    assert texts["parametric"].startswith(" Lima")


def test_the_server_answers_what_the_library_generates(server: httpx.Client) -> None:
    model = juice.load("mini")
    prompts = [CONFLICT, "The official language of Brazil is", "Question: Who wrote the book Emma? Answer:"]
    body = {"prompt": prompts, "steer": {"target": "parametric", "strength": 0.5}, "max_tokens": 12, "temperature": 0.8, "seed": 3}
    answer = server.post("/generate", json=body).json()
    completions = model.generate(prompts, steer="parametric", strength=0.5, max_tokens=12, temperature=0.8, seed=3)
    assert [choice["text"] for choice in answer["choices"]] == [c.text for c in completions]
    assert answer["usage"]["prompt_tokens"] == sum(c.n_prompt_tokens for c in completions)
    assert answer["usage"]["completion_tokens"] == sum(len(c.token_ids) for c in completions)


def test_strength_zero_is_not_applied_and_equals_no_steering(server: httpx.Client) -> None:
    plain = server.post("/generate", json={"prompt": CONFLICT, "max_tokens": 8}).json()
    zero = server.post("/generate", json={"prompt": CONFLICT, "max_tokens": 8, "steer": {"target": "context", "strength": 0}}).json()
    assert zero["steering"]["applied"] is False
    assert zero["text"] == plain["text"]


WRONG = {
    "empty_prompt": ({"prompt": ""}, 400, "prompt"),
    "no_prompt": ({}, 400, "prompt"),
    "prompt_list_empty": ({"prompt": []}, 400, "prompt"),
    "prompt_number": ({"prompt": 7}, 400, "prompt"),
    "steer_unknown": ({"prompt": "x", "steer": "truth"}, 400, "steer.target"),
    "steer_key_unknown": ({"prompt": "x", "steer": {"target": "context", "stength": 2}}, 400, "steer.stength"),
    "field_unknown": ({"prompt": "x", "steerr": "context"}, 400, "steerr"),
    "beta_absurd": ({"prompt": "x", "steer": {"target": "context", "beta_plus": 1e9}}, 400, "steer.beta_plus"),
    "beta_wrong_sign": ({"prompt": "x", "steer": {"target": "context", "beta_minus": 1}}, 400, "steer.beta_minus"),
    "head_set_unknown": ({"prompt": "x", "steer": {"target": "context", "head_set": "nothing"}}, 404, "steer.head_set"),
    "head_set_other_target": ({"prompt": "x", "steer": {"target": "context", "head_set": "parametric"}}, 400, "steer.head_set"),
    "context_exceeded": ({"prompt": "word " * 1000}, 400, "prompt"),
    "max_tokens_exceeded": ({"prompt": "x", "max_tokens": 600}, 400, "max_tokens"),
    "max_tokens_zero": ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    "temperature": ({"prompt": "x", "temperature": 3}, 400, "temperature"),
    "seed_huge": ({"prompt": "x", "seed": 2**70}, 400, "seed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused_with_the_field(server: httpx.Client, name: str) -> None:
    body, status, param = WRONG[name]
    answer = server.post("/generate", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert server.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    "raw",
    [b"{", b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"prompt": "x", "\\ud800": 1}', b'{"prompt": "x", "temperature": NaN}', b"[" * 5000],
)
def test_a_body_that_is_no_json_request_is_a_400(server: httpx.Client, raw: bytes) -> None:
    answer = server.post("/generate", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert "message" in answer.json()["error"]


def test_unknown_routes_and_methods_use_the_same_envelope(server: httpx.Client) -> None:
    assert server.get("/nothing").json()["error"]["code"] == "not_found"
    assert server.get("/generate").json()["error"]["code"] == "method_not_allowed"


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_line(tmp_path: Path) -> None:
    process, _ = start("--model", str(tmp_path))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "juice: error: the folder" in errors
    assert "Traceback" not in errors


def test_a_port_that_is_taken_ends_the_server_with_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "juice.cli.main", "serve", "--port", str(port)]
        done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "already in use" in done.stderr.lower()
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.dumps(done.stdout) == '""'
