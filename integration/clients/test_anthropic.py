"""anthropic for Python: whole, streamed, async, with tools, counted; each steered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from pydantic import BaseModel

from integration.clients import questions

PACKAGES = ("anthropic",)
ASKED: Any = [{"role": "user", "content": questions.QUESTION}]
OPTIONS: Any = {"model": questions.MODEL, "max_tokens": 24}


def greedy(steer: str) -> dict[str, Any]:
    """Return the fields beside Anthropic's; its client has no argument for the temperature."""
    return {"temperature": 0, "steer": steer}


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0) as made:
        yield made


@pytest.mark.smoke
@pytest.mark.parametrize("steer", questions.STEERS)
def test_messages_are_steered_and_the_header_says_so(api: anthropic.Anthropic, steer: str) -> None:
    raw = api.messages.with_raw_response.create(**OPTIONS, messages=ASKED, extra_body=greedy(steer))
    message = raw.parse()
    assert [block.text for block in message.content] == [questions.ANSWERS[steer]]
    assert message.stop_reason == "end_turn"
    assert message.steering["target"] == steer
    reported = json.loads(raw.headers["x-juice-steering"])
    assert (reported["target"], reported["applied"]) == (steer, steer != "none")


@pytest.mark.parametrize("steer", questions.STEERS)
def test_streams_have_the_same_text(api: anthropic.Anthropic, steer: str) -> None:
    with api.messages.stream(**OPTIONS, messages=ASKED, extra_body=greedy(steer)) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == questions.ANSWERS[steer] == final.content[0].text
    assert len(pieces) > 1


@pytest.mark.parametrize("steer", ["context", "parametric"])
def test_the_models_name_steers(api: anthropic.Anthropic, steer: str) -> None:
    message = api.messages.create(
        model=f"mini:{steer}", max_tokens=24, messages=ASKED, extra_body={"temperature": 0}
    )
    assert message.content[0].text == questions.ANSWERS[steer]


def test_several_async_requests_are_each_steered_their_own_way(url: str) -> None:
    async def ask() -> list[anthropic.types.Message]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="unused") as api:
            return await asyncio.gather(
                *(
                    api.messages.create(**OPTIONS, messages=ASKED, extra_body=greedy(steer))
                    for steer in questions.STEERS * 4
                )
            )

    texts = [message.content[0].text for message in asyncio.run(ask())]
    assert texts == [questions.ANSWERS[steer] for steer in questions.STEERS * 4]


class City(BaseModel):
    kind: Literal["capital"]
    country: Literal["Peru", "Egypt"]


def test_an_answer_is_parsed_into_a_model(api: anthropic.Anthropic) -> None:
    options: Any = {**OPTIONS, "max_tokens": 64, "messages": ASKED}
    message = api.messages.parse(**options, output_format=City, extra_body=greedy("context"))
    assert isinstance(message.parsed_output, City)
    assert message.steering["applied"] is True


def test_tools_are_called_and_what_they_return_is_believed_as_asked(
    api: anthropic.Anthropic,
) -> None:
    turns: Any = [{"role": "user", "content": questions.TOOL_QUESTION}]
    tools: Any = [{"name": questions.TOOL_NAME, "input_schema": questions.PARAMETERS}]
    options: Any = {**OPTIONS, "max_tokens": 99, "tools": tools}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    called = api.messages.create(
        **options, messages=turns, tool_choice=choice, extra_body=greedy("none")
    )
    (block,) = called.content
    assert (called.stop_reason, block.name) == ("tool_use", questions.TOOL_NAME)
    assert block.input == questions.ARGUMENTS
    with api.messages.stream(
        **options, messages=turns, tool_choice=choice, extra_body=greedy("none")
    ) as stream:
        assert stream.get_final_message().content[0].input == questions.ARGUMENTS
    result = {"type": "tool_result", "tool_use_id": block.id, "content": questions.RETURNED}
    turns += [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    for steer, expected in questions.AFTER_THE_TOOL.items():
        answer = api.messages.create(**options, messages=turns, extra_body=greedy(steer))
        assert [each.text for each in answer.content] == [expected]
    counted = api.messages.count_tokens(model=questions.MODEL, messages=turns, tools=tools)
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_misspelt_steer_is_an_error_of_the_client(api: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="contxt"):
        api.messages.create(**OPTIONS, messages=ASKED, extra_body=greedy("contxt"))
