"""Gates and positions over HTTP: the library's answers, and reports, logs and metrics of them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

import juice
from tests.support.serving import events, serving

# In conflict with what the model knows; and about nobody, so that the context is all there is.
KNOWN = "The name of the capital city of Peru is"
UNKNOWN = "The name of the capital city of Brelo is"
AUTO = {"target": "parametric", "gate": "auto"}


def claim(question: str) -> str:
    return f"{question} Cairo."


@pytest.fixture(scope="module")
def model() -> juice.SteeredModel:
    return juice.load("mini")


def ask(client: httpx.Client, question: str = KNOWN, route: str = "/generate", **body: Any) -> Any:
    asked = {
        "prompt": question,
        "context": claim(question),
        "steer": AUTO,
        "max_tokens": 6,
        "temperature": 0,
        **body,
    }
    answer = client.post(route, json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_gate_lets_memory_win_where_there_is_one_and_the_context_elsewhere(
    client: httpx.Client, model: juice.SteeredModel
) -> None:
    for question, text, steers in ((KNOWN, " Lima.", True), (UNKNOWN, " Cairo.", False)):
        answer = ask(client, question)
        each = model.generate(
            question, context=claim(question), steer="parametric", gate="auto", max_tokens=6
        )[0]
        assert answer["text"] == each.text == text
        gate = answer["steering"]["gate"]
        assert (gate["signal"], gate["steers"]) == ("memory", steers)
        assert gate["value"] == pytest.approx(each.steering.gate.value, abs=1e-4)
        assert (gate["value"] >= gate["threshold"]) is steers
        assert answer["steering"]["applied"] is steers
        assert answer["usage"]["completion_tokens"] == len(each.tokens)
        assert answer["usage"]["prompt_tokens"] == each.n_prompt_tokens
        completion = ask(client, question, "/v1/completions")
        assert completion["choices"][0]["text"] == text
        # What is kept of the prompt makes its forward another shape, which rounds differently.
        value = pytest.approx(gate["value"], abs=1e-4)
        assert completion["steering"]["gate"] == {**gate, "value": value}


def test_without_a_gate_the_report_says_so(client: httpx.Client) -> None:
    for steer in ("parametric", {"target": "parametric", "gate": "off"}):
        report = ask(client, UNKNOWN, steer=steer)["steering"]
        assert (report["applied"], report["gate"]) == (True, None)


def test_toward_the_context_a_prompt_without_one_keeps_its_answer(client: httpx.Client) -> None:
    steer = {"target": "context", "gate": "auto"}
    report = ask(client, context=None, steer=steer)
    assert (report["text"], report["steering"]["applied"]) == (" Lima.", False)
    report = ask(client, steer=steer)
    assert (report["text"], report["steering"]["applied"]) == (" Cairo.", True)
    assert report["steering"]["gate"]["signal"] == "copied"


def test_choices_and_streams_have_the_decision(client: httpx.Client) -> None:
    sampled = {"n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 6}
    answer = ask(client, UNKNOWN, **sampled)
    assert len(answer["choices"]) == 3
    off = ask(client, UNKNOWN, **{**sampled, "steer": "none"})
    assert [c["text"] for c in answer["choices"]] == [c["text"] for c in off["choices"]]
    body = {"prompt": UNKNOWN, "context": claim(UNKNOWN), "steer": AUTO, "max_tokens": 6}
    streamed = events(client.post("/generate", json={**body, "stream": True}))
    assert "".join(e.get("text", "") for e in streamed if isinstance(e, dict)) == " Cairo."
    last = [event for event in streamed if isinstance(event, dict)][-1]
    assert last["steering"]["gate"]["steers"] is False


@pytest.mark.parametrize("route", ["/generate", "/v1/completions"])
def test_of_several_prompts_each_choice_says_what_its_gate_decided(
    client: httpx.Client, route: str
) -> None:
    prompts = {"prompt": [KNOWN, UNKNOWN], "context": [claim(KNOWN), claim(UNKNOWN)], "n": 2}
    answer = ask(client, route=route, **prompts)
    applied = [choice["steering"]["applied"] for choice in answer["choices"]]
    assert applied == [True, True, False, False]
    gates = [choice["steering"]["gate"]["steers"] for choice in answer["choices"]]
    assert gates == applied
    assert answer["steering"] == answer["choices"][0]["steering"]
    alone = ask(client, route=route, n=2)
    assert all("steering" not in choice for choice in alone["choices"])


def test_of_a_list_of_one_prompt_the_answer_has_one_report(client: httpx.Client) -> None:
    for route in ("/generate", "/v1/completions"):
        answer = ask(client, route=route, prompt=[KNOWN], context=[claim(KNOWN)], n=2)
        assert all("steering" not in choice for choice in answer["choices"])


@pytest.mark.parametrize("route", ["/generate", "/v1/completions"])
def test_the_header_says_only_what_holds_for_all_prompts(client: httpx.Client, route: str) -> None:
    body = {"steer": AUTO, "max_tokens": 2}

    def told(*questions: str, **more: Any) -> dict[str, Any]:
        contexts = [claim(question) for question in questions]
        sent = {**body, "prompt": questions, "context": contexts, **more}
        return json.loads(client.post(route, json=sent).headers["x-juice-steering"])

    assert "applied" not in told(KNOWN, UNKNOWN)
    assert told(KNOWN, UNKNOWN)["head_set"] == "parametric"
    assert (told(KNOWN, KNOWN)["applied"], told(UNKNOWN)["applied"]) == (True, False)
    assert "applied" not in told(UNKNOWN, stream=True), "the gate has still to decide"
    assert told(UNKNOWN, stream=True, steer="parametric")["applied"] is True


def test_question_positions_are_the_librarys(
    client: httpx.Client, model: juice.SteeredModel
) -> None:
    steer = {"target": "parametric", "positions": "question"}
    answer = ask(client, steer=steer, logprobs=0)
    completion = model.generate(
        KNOWN,
        context=claim(KNOWN),
        steer=juice.Steer(target="parametric", positions="question"),
        max_tokens=6,
    )[0]
    assert answer["text"] == completion.text
    assert answer["logprobs"][0]["logprob"] == pytest.approx(completion.logprobs[0], abs=1e-4)
    assert answer["steering"]["positions"] == "question"
    everywhere = ask(client, steer="parametric", logprobs=0)
    assert everywhere["logprobs"][0]["logprob"] != pytest.approx(completion.logprobs[0], abs=1e-3)


def chat(client: httpx.Client, steer: Any, *messages: str, **body: Any) -> httpx.Response:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    return client.post(
        "/v1/chat/completions",
        json={"messages": turns, "steer": steer, "max_tokens": 8, "temperature": 0, **body},
    )


def test_a_chats_context_goes_before_the_last_question(client: httpx.Client) -> None:
    question, context = "What is the capital city of Peru?", "The capital city of Peru is Cairo."
    apart = chat(client, "context", question, context=context).json()
    joined = chat(client, "context", f"{context} {question}").json()
    assert apart["choices"] == joined["choices"]
    for method in ("cad", "adacad"):
        steer = {"target": "context", "method": method}
        answer = chat(client, steer, question, context=context).json()
        assert "Cairo" in answer["choices"][0]["message"]["content"]
        assert answer["steering"]["method"] == method


def test_in_a_chat_the_question_is_the_last_users_turn(
    client: httpx.Client, model: juice.SteeredModel
) -> None:
    """The oracle finds the turn in the rendered text, and tokenizes what is before it."""
    turns = ("The capital city of Peru is Cairo.", "I see.", "What is the capital city of Peru?")
    steer = {"target": "parametric", "positions": "question"}
    answer = chat(client, steer, *turns, logprobs=True).json()
    rendered = model.with_chat_template().prompts.rendered(
        [
            {"role": r, "content": t}
            for r, t in zip(("user", "assistant", "user"), turns, strict=True)
        ]
    )
    ids = model.tokenize(rendered, add_special_tokens=False)
    before = model.tokenize(rendered[: rendered.index("What is")], add_special_tokens=False)
    assert ids[: len(before)] == before
    (completion,) = model.engine.generate(
        [
            model.request(
                ids,
                steer=juice.Steer(target="parametric", positions="question"),
                question_at=len(before),
                max_tokens=8,
            )
        ]
    )
    message = answer["choices"][0]
    assert message["message"]["content"] == completion.text
    assert message["logprobs"]["content"][0]["logprob"] == pytest.approx(
        completion.logprobs[0], abs=1e-4
    )


REFUSED = {
    "another strength": (KNOWN, {**AUTO, "strength": 0.5}, "steer.gate", "strength 1"),
    "unknown": (KNOWN, {**AUTO, "gate": "open"}, "steer.gate", "auto"),
    "no target": (KNOWN, {"target": "none", "gate": "auto"}, "steer.target", "gate is given"),
    "both": (KNOWN, {**AUTO, "positions": "question"}, "steer.gate", "not all positions"),
    "cad": (KNOWN, {"target": "context", "method": "cad", "gate": "auto"}, "steer.gate", "cad"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_gate_was_not_measured_on_is_refused(client: httpx.Client, case: str) -> None:
    question, steer, param, message = REFUSED[case]
    body = {"prompt": question, "context": claim(question), "steer": steer}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_a_chat_has_no_gate_from_plain_prompts_and_a_question_needs_its_context(
    client: httpx.Client,
) -> None:
    answer = chat(client, AUTO, "What is the capital city of Peru?")
    assert answer.status_code == 400
    assert "measured on plain prompts" in answer.json()["error"]["message"]
    steer = {"target": "parametric", "positions": "question"}
    answer = client.post("/generate", json={"prompt": KNOWN, "steer": steer})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "steer.positions"


def test_a_default_gate_holds_for_all_that_steer_and_is_logged_and_counted() -> None:
    with (
        serving("--default-gate", "auto", "--log-format", "json") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        info = client.get("/info").json()["steering"]
        assert info["default_gate"] == "auto"
        assert {s["name"]: s["gates"]["juice"] is not None for s in info["head_sets"]} == {
            "context": True,
            "parametric": True,
        }
        assert ask(client, KNOWN, steer="parametric")["steering"]["gate"]["steers"] is True
        assert ask(client, UNKNOWN, steer="parametric")["steering"]["gate"]["steers"] is False
        off = {"target": "parametric", "gate": "off"}
        assert ask(client, UNKNOWN, steer=off)["steering"]["gate"] is None
        assert ask(client, UNKNOWN, steer="none")["steering"]["gate"] is None
        cad = {"target": "context", "method": "cad"}
        assert ask(client, UNKNOWN, steer=cad)["steering"]["gate"] is None
        text = client.get("/metrics").text
        assert 'juice_gated_total{steers="true"} 1.0' in text
        assert 'juice_gated_total{steers="false"} 1.0' in text
    gates = [line["gates"] for line in server.log() if "gates" in line]
    assert [[gate["steers"] for gate in each] for each in gates] == [[True], [False]]
    assert all(set(gate[0]) == {"steers", "signal", "value", "threshold"} for gate in gates)
