"""LangChain's chat models on OpenAI's route and on Anthropic's; each steered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from integration.clients import questions
from integration.clients.judging import steers
from tests.support.serving import Server

langchain_openai = pytest.importorskip("langchain_openai", reason="make clients-test installs it")
langchain_anthropic = pytest.importorskip("langchain_anthropic", reason="the same")
messages = pytest.importorskip("langchain_core.messages", reason="the same")
tools = pytest.importorskip("langchain_core.tools", reason="the same")

PACKAGES = ("langchain-openai", "langchain-anthropic")
Make = Callable[..., Any]
SHARED: dict[str, Any] = {
    "api_key": "unused",
    "temperature": 0,
    "max_tokens": 99,
    "max_retries": 0,
}


def of_openai(url: str, model: str = questions.MODEL, **extra: str) -> Any:
    given = {"include_response_headers": True, "extra_body": extra or None}
    return langchain_openai.ChatOpenAI(model=model, base_url=f"{url}/v1", **SHARED, **given)


def of_openai_responses(url: str, model: str = questions.MODEL, **extra: str) -> Any:
    given = {"use_responses_api": True, "extra_body": extra or None}
    return langchain_openai.ChatOpenAI(model=model, base_url=f"{url}/v1", **SHARED, **given)


def of_anthropic(url: str, model: str = questions.MODEL, **extra: str) -> Any:
    given = {"model_kwargs": {"extra_body": extra}} if extra else {}
    return langchain_anthropic.ChatAnthropic(model=model, base_url=url, **SHARED, **given)


ROUTES = {
    of_openai: "/v1/chat/completions",
    of_openai_responses: "/v1/responses",
    of_anthropic: "/v1/messages",
}
EVERY = pytest.mark.parametrize("make", ROUTES, ids=lambda make: make.__name__)


def text_of(message: Any) -> str:
    return str(message.text)


@pytest.mark.smoke
@EVERY
@pytest.mark.parametrize("steer", questions.STEERS)
def test_invoke_is_steered(server: Server, make: Make, steer: str) -> None:
    with steers(server, ROUTES[make]) as seen:
        answer = make(server.url, steer=steer).invoke(questions.QUESTION)
    assert text_of(answer) == questions.ANSWERS[steer]
    assert seen == [steer]
    assert answer.usage_metadata["input_tokens"] > 0


@pytest.mark.parametrize("steer", questions.STEERS)
def test_what_was_applied_can_be_read(url: str, steer: str) -> None:
    answer = of_openai(url, steer=steer).invoke(questions.QUESTION)
    header = answer.response_metadata["headers"]["x-juice-steering"]
    assert json.loads(header)["target"] == steer
    answer = of_anthropic(url, steer=steer).invoke(questions.QUESTION)
    assert answer.response_metadata["steering"]["target"] == steer


@EVERY
@pytest.mark.parametrize("steer", questions.STEERS)
def test_streams_have_the_same_text(url: str, make: Make, steer: str) -> None:
    pieces = [text_of(chunk) for chunk in make(url, steer=steer).stream(questions.QUESTION)]
    assert "".join(pieces) == questions.ANSWERS[steer]
    assert sum(map(bool, pieces)) > 1


@EVERY
@pytest.mark.parametrize("steer", ["context", "parametric"])
def test_the_models_name_steers(server: Server, make: Make, steer: str) -> None:
    with steers(server, ROUTES[make]) as seen:
        answer = make(server.url, f"mini:{steer}").invoke(questions.QUESTION)
    assert text_of(answer) == questions.ANSWERS[steer]
    assert seen == [steer]


def test_a_batch_is_steered(url: str) -> None:
    answers = of_openai(url, steer="context").batch([questions.QUESTION, questions.DOUBT] * 4)
    expected = [questions.ANSWERS["context"], questions.DOUBTS["context"]] * 4
    assert [text_of(answer) for answer in answers] == expected


class City(BaseModel):
    """A city."""

    name: Annotated[str, Field(max_length=10)]
    kind: Literal["capital"]


class Kind(BaseModel):
    """Whether a city is a capital; Anthropic's schemas have no lengths."""

    kind: Literal["capital"]


@pytest.mark.parametrize(
    ("make", "form", "method"),
    [
        (of_openai, City, "json_schema"),
        (of_openai, City, "function_calling"),
        (of_openai_responses, City, "json_schema"),
        (of_anthropic, City, "function_calling"),
        (of_anthropic, Kind, "json_schema"),
    ],
)
def test_structured_output_is_of_its_form(
    server: Server, make: Make, form: type[BaseModel], method: str
) -> None:
    model = make(server.url, steer="context").with_structured_output(form, method=method)
    with steers(server, ROUTES[make]) as seen:
        assert isinstance(model.invoke(questions.QUESTION), form)
    assert seen == ["context"]


@EVERY
def test_tools_are_called_and_what_they_return_is_believed_as_asked(url: str, make: Make) -> None:
    @tools.tool
    def capital(country: Literal["Peru"]) -> str:
        """Return the capital of a country."""
        return questions.RETURNED

    turns: list[Any] = [messages.HumanMessage(questions.TOOL_QUESTION)]
    called = make(url).bind_tools([capital], tool_choice="any", parallel_tool_calls=False)
    call = called.invoke(turns)
    assert [(tool_call["name"], tool_call["args"]) for tool_call in call.tool_calls] == [
        (questions.TOOL_NAME, questions.ARGUMENTS)
    ]
    turns += [call, capital.invoke(call.tool_calls[0])]
    assert turns[-1].content == questions.RETURNED
    for steer, expected in questions.AFTER_THE_TOOL.items():
        assert text_of(make(url, steer=steer).bind_tools([capital]).invoke(turns)) == expected
