"""POST /v1/messages through Anthropic's client: whole, streamed, steered, refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from tests.support.serving import BEARER, KEYS, Server

QUESTION = [{"role": "user", "content": "The capital of Peru is Cairo. What is it?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEYS[0], max_retries=0) as made:
        yield made


def create(client: anthropic.Anthropic, **options: Any) -> anthropic.types.Message:
    """Ask for a greedy answer; newer clients have no argument for the temperature."""
    more = {"temperature": 0, **options.pop("extra_body", {})}
    asked = {"model": "mini", "max_tokens": 24, "messages": QUESTION, **options}
    return client.messages.create(**asked, extra_body=more)


def chat_text(server: Server, messages: list[dict[str, str]], **extra: object) -> str:
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, **extra}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=BEARER)
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("steer", ["none", "context", "parametric"])
def test_a_message_is_the_answer_of_the_chat(
    client: anthropic.Anthropic, server: Server, steer: str
) -> None:
    system = [{"type": "text", "text": "Answer in one word."}]
    got = create(client, system=system, extra_body={"steer": steer})
    turns = [{"role": "system", "content": "Answer in one word."}, *QUESTION]
    assert got.content[0].text == chat_text(server, turns, steer=steer)
    assert got.steering["target"] == steer
    counted = client.messages.count_tokens(model="mini", messages=QUESTION, system=system)
    assert counted.input_tokens == got.usage.input_tokens
    assert got.usage.output_tokens > 0


def test_a_stream_is_the_whole(client: anthropic.Anthropic) -> None:
    whole = create(client, model="mini:context")
    with client.messages.stream(
        model="mini:context", max_tokens=24, messages=QUESTION, extra_body={"temperature": 0}
    ) as stream:
        pieces = list(stream.text_stream)
        last = stream.get_final_message()
    assert "".join(pieces) == whole.content[0].text == last.content[0].text
    assert len(pieces) > 1
    assert (last.stop_reason, last.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )


def test_it_says_why_the_answer_ends(client: anthropic.Anthropic) -> None:
    assert create(client, max_tokens=1).stop_reason == "max_tokens"
    text = create(client).content[0].text
    word = text[2:4]
    cut = create(client, stop_sequences=["never said", word])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
    assert text.startswith(cut.content[0].text)
    ended = create(client, max_tokens=200)
    assert ended.stop_reason == "end_turn"


def test_a_last_turn_of_the_assistants_goes_on(client: anthropic.Anthropic, server: Server) -> None:
    turns = [*QUESTION, {"role": "assistant", "content": "The capital of Peru is"}]
    expected = chat_text(server, turns, continue_final_message=True)
    assert create(client, messages=turns).content[0].text == expected


class City(BaseModel):
    kind: Literal["capital"]
    country: Literal["Peru", "Egypt"]


@pytest.mark.parametrize("steer", ["none", "context"])
def test_an_answer_is_parsed_whole_and_streamed(client: anthropic.Anthropic, steer: str) -> None:
    options: Any = {"model": "mini", "max_tokens": 64, "messages": QUESTION}
    extra = {"temperature": 0, "steer": steer}
    parsed = client.messages.parse(**options, output_format=City, extra_body=extra)
    assert isinstance(parsed.parsed_output, City)
    assert parsed.steering["target"] == steer
    with client.messages.stream(**options, output_format=City, extra_body=extra) as stream:
        assert stream.get_final_message().parsed_output == parsed.parsed_output


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "gpt-9"}, anthropic.NotFoundError),
        ({"messages": []}, anthropic.BadRequestError),
        ({"tools": [{"type": "web_search_20250305", "name": "f"}]}, anthropic.BadRequestError),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
            anthropic.BadRequestError,
        ),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"output_config": {"effort": "high"}}, anthropic.BadRequestError),
        ({"output_config": {"format": {"type": "xml"}}}, anthropic.BadRequestError),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "extra_body": {"guided_regex": "a"},
            },
            anthropic.BadRequestError,
        ),
        ({"extra_body": {"steering": "context"}}, anthropic.BadRequestError),
    ],
    ids=str,
)
def test_errors_come_in_the_envelope_of_this_client(
    client: anthropic.Anthropic, options: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        create(client, **options)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["message"]


def test_a_wrong_key_is_refused_in_its_envelope_too(server: Server) -> None:
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        create(client)
    assert caught.value.body["error"]["type"] == "authentication_error"
