"""POST /v1/responses through OpenAI's client: whole, streamed, parsed, steered."""

from __future__ import annotations

from typing import Annotated, Literal

import httpx
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel, Field

QUESTION = "The capital of Peru is Cairo. What is the capital of Peru?"


class City(BaseModel):
    name: Annotated[str, Field(max_length=10)]
    kind: Literal["capital", "other"]


def chat_text(api: openai.OpenAI, messages: list[dict[str, str]], **extra: object) -> str:
    answer = api.chat.completions.create(
        model="mini", messages=messages, max_tokens=24, temperature=0, extra_body=extra
    )
    return str(answer.choices[0].message.content)


@pytest.mark.parametrize("steer", ["none", "context", "parametric"])
def test_a_response_is_the_answer_of_the_chat(api: openai.OpenAI, steer: str) -> None:
    got = api.responses.create(
        model="mini",
        input=QUESTION,
        instructions="Answer in one word.",
        max_output_tokens=24,
        temperature=0,
        store=False,
        extra_body={"steer": steer},
    )
    messages = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": QUESTION},
    ]
    assert got.output_text == chat_text(api, messages, steer=steer)
    assert got.steering["target"] == steer
    assert got.usage.total_tokens == got.usage.input_tokens + got.usage.output_tokens > 2
    assert got.status in ("completed", "incomplete")
    Response.model_validate(got.model_dump())


def test_items_are_turns_and_the_models_alias_steers(api: openai.OpenAI) -> None:
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello!", "annotations": []}],
        },
        {"role": "user", "content": QUESTION},
    ]
    got = api.responses.create(
        model="mini:context", input=turns, max_output_tokens=24, temperature=0
    )
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": QUESTION},
    ]
    assert got.output_text == chat_text(api, plain, steer="context")


def test_a_stream_is_the_whole_in_the_documented_events(api: openai.OpenAI) -> None:
    options = {"model": "mini", "input": QUESTION, "max_output_tokens": 24, "temperature": 0}
    whole = api.responses.create(**options)
    events = list(api.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert len(deltas) > 1
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert last.usage == whole.usage


def test_the_helper_for_streams_understands_them(api: openai.OpenAI) -> None:
    with api.responses.stream(
        model="mini", input=QUESTION, max_output_tokens=200, text_format=City, temperature=1
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, City)


def test_an_answer_is_parsed_and_one_that_is_cut_is_incomplete(
    api: openai.OpenAI,
) -> None:
    got = api.responses.parse(model="mini", input=QUESTION, text_format=City, max_output_tokens=200)
    assert isinstance(got.output_parsed, City)
    assert got.status == "completed"
    cut = api.responses.create(model="mini", input=QUESTION, max_output_tokens=1)
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_log_probabilities_come_where_they_are_asked_for(api: openai.OpenAI) -> None:
    got = api.responses.create(
        model="mini",
        input=QUESTION,
        max_output_tokens=3,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    scored = got.output[0].content[0].logprobs
    assert len(scored) == got.usage.output_tokens
    assert all(len(each.top_logprobs) >= 2 for each in scored)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format"),
        ({"Steer": "context"}, "Steer"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(
    url: str, body: dict[str, object], param: str
) -> None:
    answer = httpx.post(f"{url}/v1/responses", json={"input": QUESTION, **body})
    assert answer.status_code == 400, answer.text
    assert str(answer.json()["error"]["param"]).startswith(param)
