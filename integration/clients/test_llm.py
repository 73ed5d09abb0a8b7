"""Simon Willison's `llm` command: prompts, streams, schemas, tools, chats; steered by a name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.clients import questions
from integration.clients.judging import steers
from tests.support.serving import Server

pytest.importorskip("llm", reason="make clients-test installs it")

PACKAGES = ("llm",)
KINDS = {"chat": "", "responses": "  responses: true\n", "text": "  completion: true\n"}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"type": "string", "enum": ["capital"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
TOOL = f'''
def capital(country: str) -> str:
    """Return the capital of a country."""
    return "{questions.RETURNED}"
'''
Llm = Callable[..., str]


@pytest.fixture(scope="module")
def llm(url: str, tmp_path_factory: pytest.TempPathFactory) -> Llm:
    """Return a function that runs the command with a model for each route and each `steer`."""
    folder: Path = tmp_path_factory.mktemp("llm")
    entries = [
        f"- model_id: {kind}-{steer}\n  model_name: {name}\n  api_base: {url}/v1\n"
        f"  supports_schema: true\n  supports_tools: true\n{extra}"
        for kind, extra in KINDS.items()
        for steer, name in [
            ("none", "mini"),
            ("context", "mini:context"),
            ("parametric", "mini:parametric"),
        ]
    ]
    (folder / "extra-openai-models.yaml").write_text("".join(entries))

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("llm")), *arguments],
            env={**os.environ, "LLM_USER_PATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.removesuffix("\n")

    return run


GREEDY = ("-o", "temperature", "0")


@pytest.mark.smoke
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("steer", questions.STEERS)
def test_a_prompt_is_steered_by_the_models_name(
    llm: Llm, server: Server, steer: str, stream: bool
) -> None:
    how = () if stream else ("--no-stream",)
    with steers(server, "/v1/chat/completions") as seen:
        assert (
            llm("-m", f"chat-{steer}", questions.QUESTION, *GREEDY, *how)
            == questions.ANSWERS[steer]
        )
    assert seen == [steer]


def test_the_other_routes_are_steered_too(llm: Llm) -> None:
    assert llm("-m", "responses-context", questions.QUESTION, *GREEDY) == "Cairo."
    assert (
        llm("-m", "text-parametric", questions.PROMPT, *GREEDY, "-o", "max_tokens", "8") == " Lima."
    )


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_a_schema_is_followed(llm: Llm, kind: str) -> None:
    text = llm("-m", f"{kind}-context", questions.QUESTION, "--schema", json.dumps(SCHEMA), *GREEDY)
    assert json.loads(text) == {"kind": "capital"}
    concise = "is_capital bool, is_city bool"
    text = llm("-m", f"{kind}-context", questions.QUESTION, "--schema", concise, *GREEDY)
    assert {name: type(value) for name, value in json.loads(text).items()} == {
        "is_capital": bool,
        "is_city": bool,
    }


def test_a_conversation_goes_on(llm: Llm, server: Server) -> None:
    llm("-m", "chat-context", questions.DOUBT, *GREEDY)
    with steers(server, "/v1/chat/completions") as seen:
        assert llm("-c", questions.QUESTION, *GREEDY).startswith("Cairo")
    assert seen == ["context"]


def test_offered_tools_leave_the_answer_as_it_is(llm: Llm) -> None:
    """The command cannot ask for a call, and mini makes none by itself."""
    text = llm("-m", "chat-none", questions.TOOL_QUESTION, "--functions", TOOL, *GREEDY)
    assert text == "Lima."
