"""openai for Python: whole, streamed, parsed, with tools, async; each steered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from integration.clients import questions

PACKAGES = ("openai",)
ASKED: Any = [{"role": "user", "content": questions.QUESTION}]
GREEDY: Any = {"model": questions.MODEL, "temperature": 0}


class City(BaseModel):
    name: Annotated[str, Field(max_length=10)]
    kind: Literal["capital"]


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.mark.smoke
@pytest.mark.parametrize("steer", questions.STEERS)
def test_chat_is_steered_and_the_header_says_so(api: openai.OpenAI, steer: str) -> None:
    raw = api.chat.completions.with_raw_response.create(
        **GREEDY, messages=ASKED, extra_body={"steer": steer}
    )
    answer = raw.parse()
    assert answer.choices[0].message.content == questions.ANSWERS[steer]
    reported = json.loads(raw.headers["x-juice-steering"])
    assert (reported["target"], reported["applied"]) == (steer, steer != "none")
    assert answer.steering["target"] == steer
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("steer", questions.STEERS)
def test_completions_are_steered(api: openai.OpenAI, steer: str) -> None:
    answer = api.completions.create(
        **GREEDY, prompt=questions.PROMPT, max_tokens=8, extra_body={"steer": steer}
    )
    assert answer.choices[0].text == questions.PROMPTS[steer]
    assert answer.steering["target"] == steer


@pytest.mark.parametrize("steer", ["context", "parametric"])
def test_the_models_name_steers(api: openai.OpenAI, steer: str) -> None:
    assert f"mini:{steer}" in [model.id for model in api.models.list()]
    options: Any = {"model": f"mini:{steer}", "temperature": 0}
    chat = api.chat.completions.create(**options, messages=ASKED)
    assert chat.choices[0].message.content == questions.ANSWERS[steer]
    text = api.completions.create(**options, prompt=questions.PROMPT, max_tokens=8)
    assert text.choices[0].text == questions.PROMPTS[steer]
    response = api.responses.create(**options, input=questions.DOUBT)
    assert response.output_text == questions.DOUBTS[steer]


@pytest.mark.parametrize("steer", questions.STEERS)
def test_streams_have_the_same_text(api: openai.OpenAI, steer: str) -> None:
    extra = {"steer": steer}
    with api.chat.completions.stream(**GREEDY, messages=ASKED, extra_body=extra) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == questions.ANSWERS[steer] == final.choices[0].message.content
    assert len(pieces) > 1
    chunks = [
        *api.completions.create(
            **GREEDY, prompt=questions.PROMPT, max_tokens=8, stream=True, extra_body=extra
        )
    ]
    assert "".join(chunk.choices[0].text for chunk in chunks) == questions.PROMPTS[steer]


def test_several_async_requests_are_each_steered_their_own_way(url: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as api:

            async def whole(steer: str) -> str:
                answer = await api.chat.completions.create(
                    **GREEDY, messages=ASKED, extra_body={"steer": steer}
                )
                return str(answer.choices[0].message.content)

            async def streamed(steer: str) -> str:
                stream = await api.chat.completions.create(
                    **GREEDY, messages=ASKED, extra_body={"steer": steer}, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            asked = [ask(steer) for steer in questions.STEERS * 4 for ask in (whole, streamed)]
            return await asyncio.gather(*asked)

    expected = [questions.ANSWERS[steer] for steer in questions.STEERS * 4 for _ in range(2)]
    assert asyncio.run(ask()) == expected


def test_an_answer_is_parsed_into_a_model(api: openai.OpenAI) -> None:
    answer = api.chat.completions.parse(
        **GREEDY, messages=ASKED, response_format=City, extra_body={"steer": "context"}
    )
    assert isinstance(answer.choices[0].message.parsed, City)
    assert answer.steering["applied"] is True
    response = api.responses.parse(**GREEDY, input=questions.QUESTION, text_format=City)
    assert isinstance(response.output_parsed, City)


@pytest.mark.parametrize("steer", questions.STEERS)
def test_responses_are_steered_whole_and_streamed(api: openai.OpenAI, steer: str) -> None:
    options: Any = {**GREEDY, "input": questions.QUESTION, "extra_body": {"steer": steer}}
    response = api.responses.create(**options)
    assert response.output_text == questions.ANSWERS[steer]
    assert response.steering["target"] == steer
    with api.responses.stream(**options) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == response.output_text


def test_tools_are_called_and_what_they_return_is_believed_as_asked(api: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": questions.TOOL_QUESTION}]
    options: Any = {**GREEDY, "tools": [questions.TOOL]}
    required = {"tool_choice": "required", "parallel_tool_calls": False}
    called = api.chat.completions.create(**options, messages=turns, **required)
    assert called.choices[0].finish_reason == "tool_calls"
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == questions.TOOL_NAME
    assert json.loads(call.function.arguments) == questions.ARGUMENTS
    with api.chat.completions.stream(**options, messages=turns, **required) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert [each.function.arguments for each in streamed] == [call.function.arguments]
    result = {"role": "tool", "tool_call_id": call.id, "content": questions.RETURNED}
    for steer, expected in questions.AFTER_THE_TOOL.items():
        answer = api.chat.completions.create(
            **options,
            messages=[*turns, called.choices[0].message, result],
            extra_body={"steer": steer},
        )
        assert answer.choices[0].message.content == expected


def test_tools_of_responses_are_called_and_answered(api: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **questions.TOOL["function"], "strict": False}
    turns: Any = [{"role": "user", "content": questions.TOOL_QUESTION}]
    options: Any = {**GREEDY, "tools": [tool]}
    called = api.responses.create(
        **options, input=turns, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = called.output
    assert json.loads(call.arguments) == questions.ARGUMENTS
    returned = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": questions.RETURNED,
    }
    for steer, expected in questions.AFTER_THE_TOOL.items():
        answer = api.responses.create(
            **options, input=[*turns, call, returned], extra_body={"steer": steer}
        )
        assert answer.output_text == expected


def test_a_misspelt_steer_is_an_error_of_the_client(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(**GREEDY, messages=ASKED, extra_body={"steer": "contxt"})
    assert caught.value.param == "steer.target"
