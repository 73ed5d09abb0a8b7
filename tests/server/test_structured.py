"""Answers of a given form over HTTP: OpenAI's field and vLLM's, streamed and steered."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.schemas import chained
from tests.support.serving import CONFLICT, Server, events, gauge, raw_post, serving, within


class Answer(BaseModel):
    city: Annotated[str, Field(max_length=12)]
    is_sure: bool
    year: Annotated[int, Field(ge=1900, le=2100)] | None
    tags: Annotated[list[Literal["old", "new"]], Field(max_length=2)]


SCHEMA = Answer.model_json_schema()
NAMED = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize("steer", ["none", "context", "parametric"])
def test_openais_client_parses_an_answer_into_a_model(api: openai.OpenAI, steer: str) -> None:
    got = api.chat.completions.parse(
        model="mini",
        messages=[{"role": "user", "content": CONFLICT}],
        response_format=Answer,
        max_tokens=150,
        seed=1,
        extra_body={"steer": steer},
    )
    assert isinstance(got.choices[0].message.parsed, Answer)
    assert got.choices[0].finish_reason == "stop"


def test_a_stream_is_the_whole_answer_in_pieces(api: openai.OpenAI) -> None:
    options = {
        "model": "mini",
        "messages": [{"role": "user", "content": CONFLICT}],
        "response_format": NAMED,
        "max_tokens": 150,
        "seed": 3,
    }
    whole = api.chat.completions.create(**options).choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in api.chat.completions.create(**options, stream=True)
        if chunk.choices
    ]
    assert "".join(pieces) == whole
    Answer.model_validate_json(whole)


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("response_format", NAMED, r"\{.*\}"),
        ("response_format", {"type": "text"}, ".*"),
        ("structured_outputs", {"choice": [" Lima", " Cairo"]}, " (Lima|Cairo)"),
        ("structured_outputs", {"regex": r" [A-Z]{3}\d"}, r" [A-Z]{3}\d"),
        ("structured_outputs", {"json": SCHEMA}, r"\{.*\}"),
        ("structured_outputs", '{"json": {"type": "boolean"}}', "true|false"),
        ("structured_outputs", {"grammar": 'start: " yes" | " no"'}, " (yes|no)"),
        ("guided_choice", ["a", "b"], "a|b"),
        ("guided_regex", "x{3}", "xxx"),
        ("guided_json", json.dumps({"const": [1, None]}), r"\[1, null\]"),
        ("guided_grammar", 'root ::= "u" | "v"', "u|v"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_every_field_works_on_every_route(
    url: str, field: str, value: object, pattern: str
) -> None:
    prompt = {"prompt": CONFLICT, "max_tokens": 150, "steer": "context", field: value}
    chat = {"messages": [{"role": "user", "content": CONFLICT}], "max_tokens": 150, field: value}
    texts = [
        httpx.post(f"{url}/generate", json=prompt).json()["text"],
        httpx.post(f"{url}/v1/completions", json=prompt).json()["choices"][0]["text"],
        httpx.post(f"{url}/v1/chat/completions", json=chat).json()["choices"][0]["message"][
            "content"
        ],
    ]
    with httpx.stream("POST", f"{url}/generate", json={**prompt, "stream": True}) as stream:
        texts.append("".join(event.get("text", "") for event in events(stream)))
    for text in texts:
        assert re.fullmatch(pattern, text, re.DOTALL), text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "(("}, "guided_regex"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"guided_json": {"type": "string", "not": {}}}, "guided_json"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, None),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
    ],
    ids=str,
)
def test_a_form_that_cannot_be_followed_is_refused_with_its_field(
    url: str, body: dict, param: str | None
) -> None:
    for path in ("/generate", "/v1/completions"):
        answer = httpx.post(f"{url}{path}", json={"prompt": "x", **body})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


def test_an_answer_that_is_cut_says_so(url: str) -> None:
    body = {"prompt": CONFLICT, "max_tokens": 4, "response_format": NAMED}
    answer = httpx.post(f"{url}/generate", json=body).json()
    assert answer["finish_reason"] == "length"


def test_ten_thousand_texts_are_a_choice(url: str) -> None:
    texts = [f"option {i} {i * 7919 % 10007}" for i in range(10_000)]
    body = {"prompt": CONFLICT, "max_tokens": 40, "guided_choice": texts}
    assert httpx.post(f"{url}/generate", json=body, timeout=60).json()["text"] in texts


# Before its many alternatives come more tokens than are tried out.
FAILS_LATE = "start: /[xy]{50}/ (" + " | ".join(f'"{i}"' for i in range(2100)) + ")"


def test_a_form_that_fails_in_mid_answer_is_its_clients_error(url: str) -> None:
    body = {"prompt": CONFLICT, "max_tokens": 90, "guided_grammar": FAILS_LATE}
    answer = httpx.post(f"{url}/generate", json=body, timeout=60)
    assert answer.status_code == 400
    assert "make it simpler" in answer.json()["error"]["message"]
    with httpx.stream("POST", f"{url}/generate", json={**body, "stream": True}) as stream:
        assert stream.status_code == 200
        *texts, last = events(stream)
    assert len("".join(text["text"] for text in texts)) >= 40
    assert last["error"]["code"] == "invalid_value"
    assert httpx.get(f"{url}/readyz").status_code == 200


def test_a_form_that_takes_too_much_is_refused_and_holds_nobody_up(url: str) -> None:
    body = {"prompt": "a", "max_tokens": 5}
    for regex in ("(ab|cd)?" * 60_000, r"\w?" * 5400, "((a{1,100}){1,100}){1,100}"):
        answer = httpx.post(f"{url}/generate", json={**body, "guided_regex": regex}, timeout=60)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "guided_regex"
    assert httpx.post(f"{url}/generate", json=body).status_code == 200


READS = "a vocabulary is read"
TELLS = f"""
import sys
from juice.cli.main import main
from juice.engine import structure

read = structure.LLTokenizer

def told(*given, **options):
    print({READS!r}, file=sys.stderr, flush=True)
    return read(*given, **options)

structure.LLTokenizer = told
main()
"""


def started_by(server: Server) -> set[str]:
    """Return the processes that a server's own process has started and not ended."""
    threads = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    return {pid for thread in threads for pid in thread.read_text().split()}


def test_a_server_that_is_ready_has_done_what_its_first_structure_would_wait_for() -> None:
    """Reading a large vocabulary takes seconds, in which nobody's stream goes on."""
    with serving(program=TELLS) as server:
        n_read, processes = server.errors().count(READS), started_by(server)
        assert n_read
        assert processes
        for field in ({"response_format": NAMED}, {"guided_regex": "[ab]{3}"}):
            body = {"prompt": CONFLICT, "max_tokens": 150, **field}
            assert httpx.post(f"{server.url}/generate", json=body, timeout=60).status_code == 200
        assert server.errors().count(READS) == n_read
        assert started_by(server) == processes


def chain(number: int, leaf: dict[str, Any]) -> dict[str, Any]:
    """Return a chain of definitions; another for each number."""
    return {"title": f"{number}", **chained(leaf)}


def test_chains_of_definitions_at_once_hold_nobody_up_and_end_with_their_clients(
    served: Callable[..., Server],
) -> None:
    """The last definition of each takes all the time that a form may take.

    That those end which have begun shows where the next form is compiled: it takes its turn.
    """
    server = served()
    plain, hard = {"type": "integer"}, {"type": "integer", "multipleOf": 99_999_989}
    followed = {"prompt": "a", "max_tokens": 5, "guided_json": chain(0, plain)}
    assert httpx.post(f"{server.url}/generate", json=followed, timeout=60).status_code == 200
    crowd = [server.connect() for _ in range(8)]
    for i, connection in enumerate(crowd):
        connection.sendall(raw_post({"prompt": "a", "guided_json": chain(i, hard)}))
    within(
        20,
        lambda: gauge(server.url, "requests_waiting_to_be_tokenized") > 0,
        "they wait for each other",
    )
    assert httpx.get(f"{server.url}/healthz", timeout=5).status_code == 200
    assert b"HTTP/1.1 400" in crowd[0].recv(4096)
    for connection in crowd:
        connection.close()
    within(
        20,
        lambda: gauge(server.url, "requests_waiting_to_be_tokenized") == 0,
        "nobody waits any more",
    )
    form = {"prompt": "a", "max_tokens": 5, "guided_regex": "[ab]{3}"}
    answer = httpx.post(f"{server.url}/generate", json=form, timeout=60)
    assert answer.status_code == 200, answer.text
