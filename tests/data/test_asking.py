"""Rows of a model that answers in sentences: which are kept, and what they record."""

from __future__ import annotations

from typing import Any

import pytest

from juice.data.make import REASONS, REMEDIES, make_conflicts
from juice.errors import ExampleError, UsageError
from tests.support.scripted import ScriptedModel
from tests.support.sentences import capitals
from tests.support.user_data import rows

FORMS = (
    "The capital city of {subject} is {answer}.",
    "Sure! The capital city of {subject} is **{answer}**.",
    "Great question!\n\nThat would be {answer}. Let me know if you need more.",
    "The capital city of {subject} is:\n\n{answer}",
)
WRONG = (
    "The capital city of {subject} is not {answer}.",
    "It is {other}, not {answer}.",
    "It is either {answer} or {other}.",
    "{other} and {answer} both claim that.",
    "{answer}esque buildings are all that I can think of.",
    "I don't know.",
)


def scripted(forms: tuple[str, ...], data: list[dict[str, Any]], **how: Any) -> ScriptedModel:
    others = [row["answers"][0] for row in data[1:] + data[:1]]
    return ScriptedModel(
        {
            row["question"]: forms[i % len(forms)].format(
                subject=row["subject"], answer=row["answers"][0], other=others[i]
            )
            for i, row in enumerate(data)
        },
        **how,
    )


@pytest.mark.parametrize("repeats", [False, True])
def test_forty_rows_answered_in_sentences_give_forty_examples(*, repeats: bool) -> None:
    """Where the model begins anew after an opening, its sentences are judged as a whole."""
    data = capitals(40)
    model = scripted(FORMS, data, repeats=repeats, chat_template_sha256="ab" * 32)
    examples = make_conflicts(model, rows(*data)).examples
    assert [e.subject for e in examples] == [row["subject"] for row in data]
    assert {e.chat_template_sha256 for e in examples} == {"ab" * 32}
    openings = ("The capital city of {}", "The capital city of {}", "That would be")
    for i, example in enumerate(examples):
        assert example.match == ("sentence" if repeats else "contains")
        if repeats:
            assert example.opening == ""
        elif i % len(FORMS) < 3:
            expected = openings[i % len(FORMS)].format(example.subject)
            assert example.opening.removesuffix(" is") == expected
        assert example.prompts["clean"] == f"Question: {data[i]['question']} Answer:"


def test_no_wrong_row_slips_in() -> None:
    data = capitals(42)
    model = scripted((*WRONG, FORMS[0]), data)
    made = make_conflicts(model, rows(*data))
    right = [row["subject"] for i, row in enumerate(data) if i % 7 == 6]
    assert [e.subject for e in made.examples] == right
    assert {r: n for r, n in made.dropped.items() if n} == {"unclear": 24, "not_known": 12}
    assert set(made.first_dropped) == {"unclear", "not_known"}
    assert made.first_dropped["unclear"].startswith("data:1: 'Question: What is the capital city")
    assert f"is not {data[0]['answers'][0]}." in made.first_dropped["unclear"]
    assert REASONS.keys() == REMEDIES.keys()


def test_without_an_example_every_reason_has_its_first_row_and_a_remedy() -> None:
    data = capitals(7)
    with pytest.raises(ExampleError) as caught:
        make_conflicts(scripted(WRONG, data), rows(*data))
    for reason in ("unclear", "not_known"):
        assert REASONS[reason] in str(caught.value)
        assert REMEDIES[reason] in str(caught.value)
    assert "data:1: " in str(caught.value)
    assert "data:5: " in str(caught.value)


def test_a_window_that_is_too_short_for_the_answer_misses_it() -> None:
    data = capitals(8)
    with pytest.raises(ExampleError, match="raise --max-tokens"):
        make_conflicts(scripted(FORMS[:1], data), rows(*data), max_tokens=5)


def test_a_template_asks_the_question_with_one_question_mark() -> None:
    data = capitals(8)
    template = "Facts, briefly.\nQuestion: {question}\nAnswer:"
    (first, *_) = make_conflicts(
        scripted(("{answer}.",), data), rows(*data), question_template=template
    ).examples
    assert first.prompts["clean"] == template.format(question=data[0]["question"])
    assert first.prompts["coherent"] == f"{first.context} {first.prompts['clean']}"


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("Question:", "expected a text with {question} once"),
        ("{question} {question}", "expected a text with {question} once"),
        ("{context} {question}", "has {context}; expected {question} alone"),
        ("{} {question}", "has {}; expected {question} alone"),
    ],
)
def test_a_template_without_the_question_is_refused(template: str, named: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_conflicts(ScriptedModel({}), rows(*capitals(2)), question_template=template)
    assert named in str(caught.value)
