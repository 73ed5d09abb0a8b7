"""The mistakes that end the server at startup, each with one line."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import httpx
import pytest

from juice.errors import UsageError
from juice.head_set.head_set import HeadSet
from juice_server import settings
from tests.support import tiny
from tests.support.commands import juice
from tests.support.serving import Server, serving


def has_ipv6() -> bool:
    """Return whether a server could listen on ::1; a kernel may know IPv6 and have no address."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_line(tmp_path: Path) -> None:
    server = Server("--model", str(tmp_path))
    assert server.process.wait(timeout=120) == 2
    assert "juice: error: the folder" in server.errors()
    assert "Traceback" not in server.errors()


def test_a_head_sets_folder_that_is_wrong_ends_the_server_with_one_line(tmp_path: Path) -> None:
    for folder, message in (
        (tmp_path / "nowhere", "does not exist"),
        (Path("head_sets/mini"), "give the folder above"),
    ):
        server = Server("--head-sets", str(folder))
        assert server.process.wait(timeout=120) == 2
        assert message in server.errors()


def test_a_default_steer_without_a_head_set_ends_the_server_with_one_line(tmp_path: Path) -> None:
    server = Server("--head-sets", str(tmp_path), "--default-steer", "context")
    assert server.process.wait(timeout=120) == 2
    assert "default_steer is context, but no head set" in server.errors()


def test_a_default_gate_needs_sets_that_have_one(tmp_path: Path) -> None:
    for target in ("context", "parametric"):
        head_set = HeadSet.load(Path("head_sets/mini") / target)
        if target == "context":
            head_set = head_set.with_gate("juice", None)
        head_set.save(tmp_path / "mini" / target)
    server = Server("--head-sets", str(tmp_path), "--default-gate", "auto")
    assert server.process.wait(timeout=120) == 2
    assert "default_gate is auto, but context in" in server.errors()
    assert "Traceback" not in server.errors()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-batch", "0"), "JUICE_MAX_BATCH"),
        (("--kv-memory", "much"), "JUICE_KV_MEMORY"),
        (("--api-keys-file", "/nowhere"), "/nowhere"),
        (("--default-steer", "truth"), "--default-steer"),
        (("--max-model-len", "1025"), "context of 1024"),
    ],
)
def test_a_wrong_setting_ends_the_server_with_one_line(
    arguments: tuple[str, ...], message: str
) -> None:
    server = Server(*arguments)
    assert server.process.wait(timeout=120) == 2
    assert message in server.errors()
    assert "Traceback" not in server.errors()


def test_the_server_starts_with_nothing_on_standard_error_but_its_own_lines() -> None:
    """No library's warning, advice or progress bar."""
    with serving() as server:
        lines = [line for line in server.errors().splitlines() if line]
    assert len(lines) > 4
    expected = r"\d\d:\d\d:\d\d info: |juice: (?!warning)|curl -s "
    assert not [line for line in lines if not re.match(expected, line)]


def test_a_model_whose_answers_can_have_no_form_is_served(tmp_path: Path) -> None:
    model, tokenizer = tiny.tiny_model("llama"), tiny.tiny_tokenizer()
    for config in (model.config, model.generation_config):
        config.eos_token_id = None
    tokenizer.eos_token = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with serving("--model", str(tmp_path)) as server:
        body = {"prompt": "Who?", "max_tokens": 4}
        assert httpx.post(f"{server.url}/generate", json=body).status_code == 200
        answer = httpx.post(f"{server.url}/generate", json={**body, "guided_regex": "a"})
        assert answer.status_code == 400
        reason = "answers cannot have a form: the model has no token that ends an answer"
        assert answer.json()["error"]["message"] == reason
        assert reason in server.errors()  # and who starts it knows


KUBERNETES = {
    "JUICE_SERVICE_HOST": "10.0.0.7",
    "JUICE_SERVICE_PORT": "8000",
    "JUICE_SERVICE_PORT_HTTP": "8000",
    "JUICE_PORT": "tcp://10.0.0.7:8000",
    "JUICE_PORT_8000_TCP": "tcp://10.0.0.7:8000",
    "JUICE_PORT_8000_TCP_PROTO": "tcp",
    "JUICE_PORT_8000_TCP_PORT": "8000",
    "JUICE_PORT_8000_TCP_ADDR": "10.0.0.7",
    "JUICE_CANARY_SERVICE_HOST": "10.0.0.8",
    "JUICE_CANARY_PORT": "tcp://10.0.0.8:8000",
}


def test_what_kubernetes_sets_for_a_service_called_juice_is_ignored() -> None:
    with serving("--log-format", "json", environment=KUBERNETES) as server:
        (line,) = [
            line for line in server.log() if line["message"].startswith("ignoring variables")
        ]
        assert set(line["variables"]) == set(KUBERNETES)


@pytest.mark.parametrize(
    ("name", "value", "guess"),
    [
        ("JUICE_API_KEY", "secret", "JUICE_API_KEYS"),
        ("JUICE_MAX_BACTH", "4", "JUICE_MAX_BATCH"),
        ("JUICE_COLOUR", "blue", None),
        ("JUICE_CANARY_PORT", "8000", None),
        ("JUICE_PORT", "tcp:8000", None),
    ],
)
def test_a_variable_that_is_no_setting_is_refused_with_a_guess_only_where_it_is_likely(
    name: str, value: str, guess: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt JUICE_API_KEYS must not serve openly."""
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        settings.read({})
    assert name in str(caught.value)
    assert ("did you mean" in str(caught.value)) == (guess is not None)
    assert (guess or "") in str(caught.value)


def test_a_port_in_the_environment_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUICE_PORT", "8123")
    assert settings.read({}).port == 8123


def test_a_server_that_everybody_may_use_says_so() -> None:
    with serving("--host", "0.0.0.0") as server:  # noqa: S104
        assert "anybody who reaches 0.0.0.0 may use this server" in server.errors()
    assert f"ready on {server.url} (it listens on 0.0.0.0, every interface)" in server.errors()
    assert f"curl -s {server.url}/generate" in server.errors()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no address ::1")
@pytest.mark.parametrize("host", ["::1", "::"])
def test_a_server_listens_on_ipv6(host: str) -> None:
    server = Server("--host", host)
    server.url = f"http://[::1]:{server.port}"
    server.wait_until_ready()
    assert httpx.get(f"{server.url}/healthz").status_code == 200
    assert server.stop() == 0
    assert f"ready on {server.url}" in server.errors(), "an address that a client can connect to"


def test_a_port_that_is_taken_ends_the_server_with_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = juice("serve", "--port", str(port))
    assert done.returncode == 2
    assert "already in use" in done.stderr.lower()
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
