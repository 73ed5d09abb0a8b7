"""LlamaIndex's OpenAILike: complete, chat, streams, async, tools; each steered."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from integration.clients import questions
from integration.clients.judging import steers
from tests.support.serving import Server

openai_like = pytest.importorskip(
    "llama_index.llms.openai_like", reason="make clients-test installs it"
)
llms = pytest.importorskip("llama_index.core.llms", reason="the same")
tools = pytest.importorskip("llama_index.core.tools", reason="the same")

PACKAGES = ("llama-index-llms-openai-like",)


def made(url: str, steer: str | None = None, *, is_chat: bool = True, **options: Any) -> Any:
    extra = {"extra_body": {"steer": steer}} if steer else {}
    settings = {"model": questions.MODEL, "context_window": 1024, "max_tokens": 16, **options}
    return openai_like.OpenAILike(
        api_base=f"{url}/v1",
        api_key="unused",
        temperature=0,
        max_retries=0,
        is_chat_model=is_chat,
        additional_kwargs=extra,
        **settings,
    )


def asked() -> list[Any]:
    return [llms.ChatMessage(role="user", content=questions.QUESTION)]


@pytest.mark.parametrize("steer", questions.STEERS)
def test_complete_is_steered_whole_and_streamed(server: Server, steer: str) -> None:
    model = made(server.url, steer, is_chat=False)
    with steers(server, "/v1/completions", 2) as seen:
        whole = model.complete(questions.PROMPT).text
        pieces = [chunk.delta for chunk in model.stream_complete(questions.PROMPT)]
    assert whole == "".join(pieces) == questions.PROMPTS[steer]
    assert len(pieces) > 1
    assert seen == [steer] * 2


@pytest.mark.smoke
@pytest.mark.parametrize("steer", questions.STEERS)
def test_chat_is_steered_whole_and_streamed(url: str, steer: str) -> None:
    model = made(url, steer)
    answer = model.chat(asked())
    assert answer.message.content == questions.ANSWERS[steer]
    assert answer.raw.steering["target"] == steer
    assert model.complete(questions.QUESTION).text == questions.ANSWERS[steer]
    pieces = [chunk.delta for chunk in model.stream_chat(asked())]
    assert "".join(map(str, pieces)) == questions.ANSWERS[steer]
    assert sum(map(bool, pieces)) > 1


@pytest.mark.parametrize("steer", ["context", "parametric"])
def test_the_models_name_steers(url: str, steer: str) -> None:
    answer = made(url, model=f"mini:{steer}").chat(asked())
    assert answer.message.content == questions.ANSWERS[steer]
    assert answer.raw.steering["applied"] is True


def test_async_requests_are_each_steered_their_own_way(url: str) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(made(url, s).achat(asked()) for s in questions.STEERS))

    answers = [answer.message.content for answer in asyncio.run(ask())]
    assert answers == [questions.ANSWERS[steer] for steer in questions.STEERS]


class Asked(BaseModel):
    country: Literal["Peru"]


def test_tools_are_called_and_what_they_return_is_believed_as_asked(url: str) -> None:
    def capital(country: str) -> str:
        """Return the capital of a country."""
        return questions.RETURNED

    tool = tools.FunctionTool.from_defaults(fn=capital, fn_schema=Asked)
    options: Any = {"is_function_calling_model": True, "max_tokens": 99}
    question = llms.ChatMessage(role="user", content=questions.TOOL_QUESTION)
    model = made(url, **options)
    answer = model.chat_with_tools(
        [tool], chat_history=[question], tool_required=True, allow_parallel_tool_calls=False
    )
    (call,) = model.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == (questions.TOOL_NAME, questions.ARGUMENTS)
    result = llms.ChatMessage(
        role="tool",
        content=str(tool(**call.tool_kwargs)),
        additional_kwargs={"tool_call_id": call.tool_id},
    )
    turns = [question, answer.message, result]
    for steer, expected in questions.AFTER_THE_TOOL.items():
        steered = made(url, steer, **options).chat_with_tools([tool], chat_history=turns)
        assert steered.message.content == expected
