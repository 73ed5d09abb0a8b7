"""Chat templates over HTTP: steering through them, and what is said of sets of another form."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

import juice
from tests.support import tiny
from tests.support.chat_templates import LINES, PLAIN, loaded, made_set, sha256, tokenizer
from tests.support.serving import events, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Serve a chat model with its template from a file and head sets found in every form."""
    place = tmp_path_factory.mktemp("chat") / "tiny"
    folder = tiny.save(place, tiny.tiny_model("llama"), tokenizer(LINES))
    (folder / "plain.jinja").write_text(PLAIN)
    model = juice.load(folder)
    for name, found_through in (("raw", None), ("chat", PLAIN), ("other", LINES)):
        made_set(model, name, found_through).save(folder / "sets" / "m" / name)
    arguments = (
        "--model",
        str(folder),
        "--head-sets",
        str(folder / "sets"),
        "--chat-template",
        str(folder / "plain.jinja"),
    )
    with (
        serving(*arguments, "--served-model-name", "tiny") as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        client.server_errors = running.errors
        yield client


WARNINGS = {
    ("/generate", "raw"): None,
    ("/v1/completions", "raw"): None,
    ("/v1/chat/completions", "raw"): "went through a chat template",
    ("/generate", "chat"): "did not go through one",
    ("/v1/completions", "chat"): "did not go through one",
    ("/v1/chat/completions", "chat"): None,
    ("/v1/chat/completions", "other"): f"went through {sha256(PLAIN)[:12]}",
}


@pytest.mark.parametrize(("route", "name"), WARNINGS)
def test_every_answer_reports_whether_its_set_was_found_in_another_form(
    server: httpx.Client, route: str, name: str
) -> None:
    asked = (
        {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in route else {"prompt": "Hi"}
    )
    body = {
        **asked,
        "steer": {"target": "context", "head_set": name},
        "max_tokens": 2,
        "temperature": 0,
    }
    plain = server.post(route, json={**asked, "max_tokens": 2}).json()["steering"]
    assert (plain["applied"], plain["warnings"]) == (False, [])
    steering = server.post(route, json=body).json()["steering"]
    assert steering["applied"] is True
    expected = WARNINGS[route, name]
    assert len(steering["warnings"]) == (expected is not None)
    assert (expected or "") in "".join(steering["warnings"])
    with server.stream("POST", route, json={**body, "stream": True}) as response:
        assert (
            next(event["steering"] for event in reversed(events(response)) if "steering" in event)
            == steering
        )


def test_a_chat_over_http_is_steered_as_in_the_library_through_the_same_template(
    server: httpx.Client,
) -> None:
    model = loaded(PLAIN)
    chat = model.with_chat_template()
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0}
    texts = {}
    for steer in ({"target": "context", "head_set": "chat"}, "none"):
        answer = server.post("/v1/chat/completions", json={**body, "steer": steer}).json()
        asked = (
            {}
            if steer == "none"
            else {"steer": "context", "head_set": made_set(model, "chat", PLAIN)}
        )
        completion = chat.generate("Hi", max_tokens=12, **asked)[0]
        assert answer["choices"][0]["message"]["content"] == completion.text
        assert answer["usage"]["prompt_tokens"] == completion.n_prompt_tokens
        texts[str(steer)] = completion.text
    assert len(set(texts.values())) == 2


def test_the_server_shows_the_hashes_and_warns_at_startup_of_what_does_not_match(
    server: httpx.Client,
) -> None:
    listed = {
        each["name"]: each["chat_template_sha256"]
        for each in server.get("/v1/head_sets").json()["data"]
    }
    assert listed == {"raw": None, "chat": sha256(PLAIN), "other": sha256(LINES)}
    about = server.get("/info").json()["model"]
    assert (about["has_chat_template"], about["chat_template_sha256"]) == (True, sha256(PLAIN))
    warned = [
        line
        for line in server.server_errors().splitlines()
        if "warning" in line and "chat template" in line
    ]
    assert len(warned) == 1, "the set of the served template needs no warning"
    assert "'other'" in warned[0]
