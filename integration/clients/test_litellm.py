"""LiteLLM on OpenAI's routes and on Anthropic's: whole, streamed, with tools; each steered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from integration.clients import questions
from integration.clients.judging import steers
from tests.support.serving import Server

PACKAGES = ("litellm",)
ASKED = [{"role": "user", "content": questions.QUESTION}]
ROUTES = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}
EVERY = pytest.mark.parametrize("provider", ROUTES)


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    module = pytest.importorskip("litellm", reason="make clients-test installs it")
    module.suppress_debug_info = True
    return module


def options(url: str, provider: str, name: str = questions.MODEL) -> dict[str, Any]:
    base = f"{url}/v1" if provider == "openai" else url
    greedy = {"temperature": 0, "max_tokens": 99, "num_retries": 0}
    return {"model": f"{provider}/{name}", "api_base": base, "api_key": "unused", **greedy}


@pytest.mark.smoke
@EVERY
@pytest.mark.parametrize("steer", questions.STEERS)
def test_completion_is_steered_and_the_header_says_so(
    litellm: Any, server: Server, provider: str, steer: str
) -> None:
    with steers(server, ROUTES[provider]) as seen:
        answer = litellm.completion(messages=ASKED, steer=steer, **options(server.url, provider))
    assert answer.choices[0].message.content == questions.ANSWERS[steer]
    assert seen == [steer]
    headers = answer._hidden_params["additional_headers"]
    reported = json.loads(headers["llm_provider-x-juice-steering"])
    assert (reported["target"], reported["applied"]) == (steer, steer != "none")
    assert answer.usage.completion_tokens > 0


@EVERY
@pytest.mark.parametrize("steer", questions.STEERS)
def test_streams_have_the_same_text(litellm: Any, url: str, provider: str, steer: str) -> None:
    chunks = litellm.completion(messages=ASKED, steer=steer, stream=True, **options(url, provider))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == questions.ANSWERS[steer]
    assert sum(map(bool, pieces)) > 1


@EVERY
@pytest.mark.parametrize("steer", ["context", "parametric"])
def test_the_models_name_steers(litellm: Any, url: str, provider: str, steer: str) -> None:
    answer = litellm.completion(messages=ASKED, **options(url, provider, f"mini:{steer}"))
    assert answer.choices[0].message.content == questions.ANSWERS[steer]


@EVERY
def test_async_requests_are_each_steered_their_own_way(
    litellm: Any, url: str, provider: str
) -> None:
    async def ask() -> list[Any]:
        given = options(url, provider)
        return await asyncio.gather(
            *(litellm.acompletion(messages=ASKED, steer=s, **given) for s in questions.STEERS)
        )

    texts = [answer.choices[0].message.content for answer in asyncio.run(ask())]
    assert texts == [questions.ANSWERS[steer] for steer in questions.STEERS]


@pytest.mark.parametrize("steer", questions.STEERS)
def test_text_completion_is_steered(litellm: Any, url: str, steer: str) -> None:
    given = options(url, "openai") | {"model": f"text-completion-openai/{questions.MODEL}"}
    answer = litellm.text_completion(prompt=questions.PROMPT, **given, extra_body={"steer": steer})
    assert answer.choices[0].text == questions.PROMPTS[steer]


class Kind(BaseModel):
    kind: Literal["capital"]


@EVERY
def test_an_answer_has_the_form_that_was_asked_for(litellm: Any, url: str, provider: str) -> None:
    answer = litellm.completion(
        messages=ASKED, response_format=Kind, steer="context", **options(url, provider)
    )
    assert Kind.model_validate_json(answer.choices[0].message.content)


@EVERY
def test_tools_are_called_and_what_they_return_is_believed_as_asked(
    litellm: Any, url: str, provider: str
) -> None:
    given = {**options(url, provider), "tools": [questions.TOOL]}
    turns: list[Any] = [{"role": "user", "content": questions.TOOL_QUESTION}]
    required = {"tool_choice": "required", "parallel_tool_calls": False}
    called = litellm.completion(messages=turns, **given, **required).choices[0]
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert call.function.name == questions.TOOL_NAME
    assert json.loads(call.function.arguments) == questions.ARGUMENTS
    chunks = list(litellm.completion(messages=turns, **given, **required, stream=True))
    streamed = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert [json.loads(made.function.arguments) for made in streamed] == [questions.ARGUMENTS]
    result = {"role": "tool", "tool_call_id": call.id, "content": questions.RETURNED}
    for steer, expected in questions.AFTER_THE_TOOL.items():
        answer = litellm.completion(messages=[*turns, called.message, result], **given, steer=steer)
        assert answer.choices[0].message.content == expected
