"""/compare, /origins, /sweep and /explain against the definition, run slowly beside them."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import torch

import juice
from tests.support import oracle
from tests.support.nearly import nearly
from tests.support.serving import LONG, events, serving

QUESTION = "The name of the capital city of Peru is"
CONTEXT = f"{QUESTION} Cairo."
ASKED = {"prompt": QUESTION, "context": CONTEXT}
CHAT = {
    "messages": [{"role": "user", "content": "What is the capital of Peru?"}],
    "context": "The capital of Peru is Cairo.",
}
EQUAL = {"rel": 1e-3, "abs": 1e-4}


@pytest.fixture(scope="module")
def model() -> juice.SteeredModel:
    return juice.load("mini")


def post(client: httpx.Client, route: str, **body: Any) -> dict[str, Any]:
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def logprobs(
    model: juice.SteeredModel, ids: list[int], coefficients: dict[tuple[int, int], float]
) -> torch.Tensor:
    """Return the log-probabilities after each token, by two runs, one after the other."""
    network = model.engine.loaded.model
    logits = oracle.steered_logits(network, ids, coefficients)
    return torch.log_softmax(logits.double(), -1)


def betas(model: juice.SteeredModel, target: str, strength: float = 1) -> dict[Any, float]:
    head_set = model.head_sets.get(target)
    plus, minus = head_set.betas().plus, head_set.betas().minus
    return {
        **{(head.layer, head.index): strength * plus for head in head_set.heads.plus},
        **{(head.layer, head.index): strength * minus for head in head_set.heads.minus},
    }


def prompt_ids(client: httpx.Client, text: str) -> list[int]:
    ids: list[int] = post(client, "/tokenize", text=text)["tokens"]
    return ids


def test_a_stream_of_compare_is_its_whole_answer(client: httpx.Client) -> None:
    body = {**ASKED, "max_tokens": 6, "logprobs": True, "top": 3}
    whole = post(client, "/compare", **body)
    with client.stream("POST", "/compare", json={**body, "stream": True}) as answer:
        *parts, last = events(answer)
    assert {part["target"] for part in parts} == set(whole["answers"])
    for target, each in whole["answers"].items():
        mine = [part for part in parts if part["target"] == target]
        assert "".join(part["text"] for part in mine) == each["text"]
        assert [token for part in mine for token in part["logprobs"]] == nearly(each["logprobs"])
        assert last["answers"][target]["steering"] == each["steering"]
    assert last["disagree"] is whole["disagree"] is True
    order = [part["target"] for part in parts]
    last_to_begin = max(order.index(target) for target in whole["answers"])
    first_to_end = min(len(order) - 1 - order[::-1].index(target) for target in whole["answers"])
    assert last_to_begin < first_to_end, "they run side by side"


SAID = "São 日本\n🙂 done"


@pytest.mark.parametrize("stream", [False, True])
def test_the_shares_of_the_tokens_are_the_text(client: httpx.Client, *, stream: bool) -> None:
    """Several tokens make one character, and the token at the end is none."""
    body = {**ASKED, "logprobs": True, "max_tokens": 64, "structured_outputs": {"choice": [SAID]}}
    whole = post(client, "/compare", **body)["answers"]
    tokens = {target: each["logprobs"] for target, each in whole.items()}
    if stream:
        with client.stream("POST", "/compare", json={**body, "stream": True}) as answer:
            *parts, _ = events(answer)
        assert tokens == {
            target: [
                token for part in parts if part["target"] == target for token in part["logprobs"]
            ]
            for target in whole
        }
    for target, item in whole.items():
        assert "".join(token["text"] for token in tokens[target]) == item["text"] == SAID
        assert len(tokens[target]) > len(item["text"].encode()) / 4
        assert any(token["text"] == "" for token in tokens[target][:-1]), "parts of a character"
        assert all("\N{REPLACEMENT CHARACTER}" not in token["text"] for token in tokens[target])
        assert tokens[target][-1]["text"] == "", "that which ends it"


def test_compare_takes_chats_strengths_gates_and_head_sets(client: httpx.Client) -> None:
    chat = post(client, "/compare", **CHAT, max_tokens=8)["answers"]
    assert {target: each["text"] for target, each in chat.items()} == {
        "none": "Lima.",
        "context": "Cairo.",
        "parametric": "Lima.",
    }
    for target, item in chat.items():
        steer = {"target": target}
        alone = post(client, "/v1/chat/completions", **CHAT, steer=steer, max_tokens=8)
        assert alone["steering"] == item["steering"]
    weak = post(client, "/compare", **ASKED, strength=0, max_tokens=4)["answers"]
    assert weak["parametric"]["text"] == weak["none"]["text"]
    gated = post(client, "/compare", **ASKED, gate="auto", max_tokens=4)["answers"]
    assert gated["parametric"]["steering"]["gate"]["steers"] is True
    named = {"parametric": "parametric", "context": "context"}
    assert post(client, "/compare", **ASKED, head_sets=named, max_tokens=4)["disagree"] is True


def test_origins_are_the_unsteered_readings_of_each_token(
    client: httpx.Client, model: juice.SteeredModel
) -> None:
    answers = [prompt_ids(client, " Cairo.")[1:], prompt_ids(client, " Lima.")[1:]]
    found = post(client, "/origins", **ASKED, answers=answers)["origins"]
    for answer, item in zip(answers, found, strict=True):
        assert [token["id"] for token in item] == answer
        for name, text in (
            ("with_context", f"{CONTEXT} {QUESTION}"),
            ("without_context", QUESTION),
        ):
            ids = prompt_ids(client, text)
            read = logprobs(model, [*ids, *answer], {})[len(ids) - 1 : -1]
            expected = [float(read[i, token]) for i, token in enumerate(answer)]
            assert [token[name] for token in item] == pytest.approx(expected, **EQUAL)
    cairo, lima = (each[0]["with_context"] - each[0]["without_context"] for each in found)
    assert cairo > 2 > lima


def test_a_sweep_is_the_two_runs_at_each_strength(
    client: httpx.Client, model: juice.SteeredModel
) -> None:
    strengths = [0, 0.5, 1, 2]
    found = post(client, "/sweep", **ASKED, target="parametric", strengths=strengths)
    ids = prompt_ids(client, f"{CONTEXT} {QUESTION}")
    memory, context = found["curves"]
    assert (memory["text"], context["text"]) == (" L", " C")
    for i, strength in enumerate(strengths):
        last = logprobs(model, ids, betas(model, "parametric", strength))[-1]
        for each in (memory, context):
            (token,) = each["tokens"]
            assert each["probabilities"][i] == pytest.approx(math.exp(last[token]), **EQUAL)
    lead = [a - b for a, b in zip(memory["probabilities"], context["probabilities"], strict=True)]
    assert lead[0] < 0 < lead[1]
    assert 0 < found["flip"] < 0.5
    between = post(
        client,
        "/sweep",
        **ASKED,
        target="parametric",
        strengths=[found["flip"] - 0.005, found["flip"] + 0.005],
    )
    one, other = (curve["probabilities"] for curve in between["curves"])
    assert one[0] < other[0]
    assert one[1] > other[1]


def test_answers_of_several_tokens_are_likely_as_a_whole(
    client: httpx.Client, model: juice.SteeredModel
) -> None:
    found = post(
        client, "/sweep", **ASKED, target="context", answers=[" Lima.", " Cairo."], strengths=[0, 1]
    )
    ids = prompt_ids(client, f"{CONTEXT} {QUESTION}")
    assert found["after"] == ""
    for curve in found["curves"]:
        assert len(curve["tokens"]) > 1
        for i, strength in enumerate([0, 1]):
            coefficients = betas(model, "context", strength)
            read = logprobs(model, [*ids, *curve["tokens"]], coefficients)[len(ids) - 1 : -1]
            total = sum(float(read[k, token]) for k, token in enumerate(curve["tokens"]))
            assert curve["probabilities"][i] == pytest.approx(math.exp(total), **EQUAL)


NOT_FOUND = ("id", "timing", "created")  # by looking, but of each answer its own


def shown(client: httpx.Client, route: str, body: dict[str, Any]) -> dict[str, Any]:
    found = post(client, route, **body)
    return {key: value for key, value in found.items() if key not in NOT_FOUND}


@contextmanager
def crowd(url: str) -> Iterator[None]:
    """Keep asking for long answers of all kinds, of which every other one is left at once."""
    over = threading.Event()

    def ask(i: int) -> None:
        steer = ("none", "context", "parametric")[i % 3]
        body = {**LONG, "max_tokens": 40, "steer": steer, "temperature": i % 2, "stream": True}
        with httpx.Client(base_url=url, timeout=60) as mine:
            while not over.is_set():
                with mine.stream("POST", "/generate", json={**body, "logprobs": i}) as answer:
                    lines = answer.iter_lines()
                    next(lines)
                    if i % 2:
                        list(lines)

    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(ask, i) for i in range(6)]
        try:
            yield
        finally:
            over.set()
        for each in running:
            each.result()


@pytest.mark.parametrize("n", [1, pytest.param(10, marks=pytest.mark.long)])
def test_what_is_shown_in_a_crowd_is_what_is_shown_alone(client: httpx.Client, n: int) -> None:
    """Kills: the scores of another row, a head left out of another's run."""
    answers = [prompt_ids(client, " Cairo.")[1:], prompt_ids(client, " Lima.")[1:]]
    scored = {"max_tokens": 5, "logprobs": 5}
    asked: list[tuple[str, dict[str, Any]]] = [
        *(("/explain", {**ASKED, "target": target}) for target in ("context", "parametric")),
        ("/origins", {**ASKED, "answers": answers}),
        ("/sweep", {**ASKED, "target": "context", "answers": [" Lima.", " Cairo."]}),
        ("/generate", {"prompt": [CONTEXT, QUESTION], "steer": "context", **scored}),
        ("/v1/completions", {"prompt": CONTEXT, "echo": True, "temperature": 0, **scored}),
    ]
    alone = [shown(client, *each) for each in asked]
    order = Random(0).sample(range(len(asked)), len(asked)) * n
    with crowd(str(client.base_url)), ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda i: shown(client, *asked[i]), order))
    for i, each in zip(order, found, strict=True):
        assert each == nearly(alone[i])


def test_what_both_say_alike_has_no_curves(client: httpx.Client) -> None:
    alike = {"prompt": QUESTION, "context": f"{QUESTION} Lima."}
    found = post(client, "/sweep", **alike, target="context", max_tokens=3)
    assert found["curves"] == []
    assert found["flip"] is None
    assert found["after"] == " Lima"


@pytest.mark.parametrize("target", ["parametric", "context"])
def test_an_explanation_leaves_each_head_out(
    client: httpx.Client, model: juice.SteeredModel, target: str
) -> None:
    found = post(client, "/explain", **ASKED, target=target)
    one, other = (token["id"] for token in found["tokens"])
    ids, every = prompt_ids(client, f"{CONTEXT} {QUESTION}"), betas(model, target)

    def difference(coefficients: dict[Any, float]) -> float:
        last = logprobs(model, ids, coefficients)[-1]
        return float(last[one] - last[other])

    assert found["unsteered"] == pytest.approx(difference({}), abs=2e-3)
    assert found["steered"] == pytest.approx(difference(every), abs=2e-3)
    assert {(each["layer"], each["head"]) for each in found["heads"]} == set(every)
    for candidate in found["heads"]:
        head = candidate["layer"], candidate["head"]
        assert candidate["beta"] == every[head]
        left = {key: value for key, value in every.items() if key != head}
        effect = difference(every) - difference(left)
        assert candidate["effect"] == pytest.approx(effect, abs=5e-3)
    effects = [abs(each["effect"]) for each in found["heads"]]
    assert effects == sorted(effects, reverse=True)
    assert effects[0] > 0.2
    for way, candidate in found["candidates"].items():
        last = logprobs(model, ids, {} if way == "none" else betas(model, way))[-1]
        assert [token["id"] for token in candidate] == last.topk(10).indices.tolist()


def test_a_later_token_is_explained_after_those_before_it(client: httpx.Client) -> None:
    answers = post(client, "/compare", **CHAT, logprobs=True, max_tokens=4)["answers"]
    ids = [token["id"] for token in answers["context"]["logprobs"]]
    found = post(client, "/explain", **CHAT, target="context", answer=ids[:1])
    assert found["candidates"]["context"][0]["id"] == ids[1]


def test_a_sweep_and_an_explanation_take_the_head_sets_of_compare(
    model: juice.SteeredModel, tmp_path: Path
) -> None:
    """A set toward memory that hardly steers: with it, memory says what the model says alone."""
    shutil.copytree("head_sets/mini", tmp_path / "mini")
    model.make_head_set(
        name="weak", target="parametric", plus=[], minus=[(3, 0)], beta_minus=-0.001
    ).save(tmp_path / "mini" / "weak")
    named = {"head_sets": {"parametric": "weak"}}
    with (
        serving("--head-sets", str(tmp_path)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        answers = post(client, "/compare", **ASKED, **named, max_tokens=4)["answers"]
        assert answers["parametric"]["steering"]["head_set"] == "weak"
        assert answers["parametric"]["text"] == answers["none"]["text"]
        alone = post(client, "/explain", **ASKED, target="context")["candidates"]
        found = post(client, "/explain", **ASKED, **named, target="context")
        assert found["steering"]["head_set"] == "context"
        assert found["candidates"]["context"] == alone["context"]
        lead = found["candidates"]["parametric"][0]
        assert lead["id"] == alone["none"][0]["id"] != alone["parametric"][0]["id"]
        swept = [
            post(client, "/sweep", **ASKED, **each, target="context", max_tokens=4)["curves"]
            for each in (named, {})
        ]
        assert [each[0]["text"] for each in swept if each] == [" L"], "only the strong set differs"
        one = post(client, "/explain", **ASKED, target="parametric", head_set="weak")
        two = post(client, "/explain", **ASKED, **named, target="parametric")
        assert one == two
        assert one["steering"]["head_set"] == "weak"


@pytest.mark.parametrize(
    ("route", "body", "named"),
    [
        ("/compare", {"prompt": "x", "steer": "context"}, "leave out steer"),
        ("/compare", {"prompt": "x", "messages": CHAT["messages"]}, "a prompt, or messages"),
        ("/compare", {}, "a prompt, or messages"),
        ("/compare", {"prompt": "x", "n": 2}, "leave out n"),
        ("/origins", {"prompt": "x", "answers": [[1]]}, "give the context apart"),
        ("/origins", {**ASKED, "answers": []}, "answers"),
        ("/sweep", {**ASKED, "target": "none"}, "target"),
        ("/sweep", {**ASKED, "target": "context", "strengths": [1, 0]}, "rising order"),
        ("/sweep", {**ASKED, "target": "context", "answers": ["a", "a"]}, "the same"),
        ("/explain", {**ASKED, "target": "context", "tokens": [5, 5]}, "the same"),
        ("/explain", {**ASKED, "target": "context", "tokens": [5, 10**6]}, "watch"),
        ("/explain", {**ASKED, "target": "context", "strength": -1}, "strength"),
        (
            "/explain",
            {**ASKED, "target": "context", "head_set": "a", "head_sets": {"context": "b"}},
            "once",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_shown_is_refused(
    client: httpx.Client, route: str, body: dict[str, Any], named: str
) -> None:
    answer = client.post(route, json=body)
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]["message"]


def test_a_comparison_counts_its_prompt_once(client: httpx.Client) -> None:
    found = post(client, "/compare", **ASKED, max_tokens=3)
    assert len(found["answers"]) == 3
    n_prompt = len(prompt_ids(client, f"{CONTEXT} {QUESTION}"))
    assert found["usage"]["prompt_tokens"] == n_prompt
