"""POST /compare with columns: as many ways to steer as are asked for, each as if it came alone."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.test_inline import BY_COEFFICIENT, BY_SIGN
from tests.support.serving import events

CONTEXT, QUESTION = "The capital of Peru is Cairo.", "The capital of Peru is"
BODY = {"prompt": QUESTION, "context": CONTEXT, "temperature": 0, "max_tokens": 6}
COLUMNS: list[Any] = [
    "none",
    "parametric",
    {"target": "parametric", "strength": 0.25},
    {"target": "context", "head_set": "context", "positions": "question"},
    BY_SIGN,
    {**BY_COEFFICIENT, "method": "june", "positions": "last", "strength": [1, 2]},
    {"target": "context", "method": "cad", "strength": 2},
    {"target": "parametric", "gate": "auto"},
]


def test_each_column_is_what_its_steer_gives_alone(client: httpx.Client) -> None:
    given = {**BODY, "columns": COLUMNS, "top": 3, "logprobs": True, "explain": "effect"}
    answer = client.post("/compare", json=given)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert len(found["answers"]) == len(COLUMNS)
    for column, each in zip(COLUMNS, found["answers"], strict=True):
        body = {**BODY, "steer": column, "logprobs": 3, "explain": "effect"}
        alone = client.post("/generate", json=body).json()
        assert each["text"] == alone["text"], column
        for mine, other in zip(each["logprobs"], alone["logprobs"], strict=True):
            assert mine["id"] == other["id"]
            assert mine["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        mine, other = each["steering"], alone["steering"]
        assert mine["effect"]["steered"]["id"] == other["effect"]["steered"]["id"]
        for unlike in ("effect", "gate"):
            mine.pop(unlike), other.pop(unlike)
        assert mine == other
        assert len(each["first_token"]) == 3
    assert found["disagree"] is True


def test_a_stream_numbers_its_columns(client: httpx.Client) -> None:
    given = {**BODY, "columns": ["none", "parametric"]}
    whole = client.post("/compare", json=given).json()
    with client.stream("POST", "/compare", json={**given, "stream": True}) as response:
        *pieces, last = events(response)
    texts = ["", ""]
    for piece in pieces:
        texts[piece["column"]] += piece["text"]
    assert texts == [each["text"] for each in whole["answers"]]
    assert [each["steering"] for each in last["answers"]] == [
        each["steering"] for each in whole["answers"]
    ]


def test_one_column_disagrees_with_nobody(client: httpx.Client) -> None:
    assert client.post("/compare", json={**BODY, "columns": ["none"]}).json()["disagree"] is False


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"columns": []}, "columns"),
        ({"columns": ["none"] * 17}, "columns"),
        ({"columns": ["truth"]}, "columns.0.target"),
        ({"columns": [{"target": "parametric", "streng": 1}]}, "columns"),
        ({"columns": ["none"], "strength": 2}, ""),
        ({"columns": ["none"], "head_sets": {"context": "context"}}, ""),
        ({"columns": ["none"], "steer": "context"}, ""),
        ({"columns": [{"target": "parametric", "head_set": "nothing"}]}, "steer.head_set"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    client: httpx.Client, more: dict[str, Any], param: str
) -> None:
    answer = client.post("/compare", json={**BODY, **more})
    assert answer.status_code in (400, 404), answer.text
    assert (answer.json()["error"]["param"] or "").startswith(param), answer.text
