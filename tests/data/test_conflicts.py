"""Conflict examples made from a user's own questions, passages and answers."""

from __future__ import annotations

from typing import Any

import pytest

from juice.data.judging import contains_answer, normalise
from juice.data.make import make_conflicts
from juice.errors import ExampleError
from juice.identification.examples import usable_examples
from juice.identification.options import IdentificationOptions
from juice.steered_model import SteeredModel
from tests.support.user_data import languages, rows

KNOWN = "What is the capital city of Luxembourg"


def test_examples_are_made_of_what_the_model_answers_right_without_the_passage(
    mini: SteeredModel,
) -> None:
    """The oracle asks one question at a time."""
    data = languages()
    made = make_conflicts(mini, rows(*data))
    known = []
    for row in data:
        answer = mini.generate(f"Question: {row['question']} Answer:", max_tokens=15)[0].text
        known += [row] if contains_answer(answer, row["answers"]) else []
    assert 2 <= len(known) < len(data)
    assert [e.subject for e in made.examples] == [row["subject"] for row in known]
    assert made.dropped["not_known"] == len(data) - len(known)
    everybodys = {row["answers"][0] for row in data}
    for example, row in zip(made.examples, known, strict=True):
        (new,) = example.context_answer
        assert new in everybodys
        assert not any(
            normalise(new) in normalise(a) or normalise(a) in normalise(new) for a in row["answers"]
        )
        assert (
            example.context
            == f"{row['subject']} has many towns. Schools there teach in {new}. It rains."
        )
        clean = f"Question: {row['question']} Answer:"
        assert example.question == clean
        assert example.prompts == {
            "clean": clean,
            "substitution": f"Schools there teach in {new}. {clean}",
            "coherent": f"{example.context} {clean}",
        }
        assert set(example.parametric_answer) == set(row["answers"])
        assert contains_answer(
            mini.generate(clean, max_tokens=15)[0].text, [example.answer("parametric")]
        )


def test_examples_that_were_made_can_be_used_to_identify_heads(mini: SteeredModel) -> None:
    made = make_conflicts(mini, rows(*languages(60))).examples
    drawn, rest = usable_examples(mini, made, IdentificationOptions(n_examples=4))
    assert len(drawn) == 4
    assert len(rest) == len(made) - 4


def test_a_seed_fixes_the_answers_that_are_swapped_in_and_they_vary(mini: SteeredModel) -> None:
    data = languages(60)
    swapped = [
        [e.context_answer for e in make_conflicts(mini, rows(*data), seed=seed).examples]
        for seed in (0, 0, 1)
    ]
    assert swapped[0] == swapped[1] != swapped[2]
    assert len(set(swapped[0])) >= 10


def fact(**changes: Any) -> dict[str, Any]:
    return {
        "question": KNOWN,
        "context": "It is Luxembourg. It rains.",
        "answer": "Luxembourg",
        **changes,
    }


# The model does not know this.
OTHER = fact(question="Who knows", context="Nobody knows Vienna.", answer="Vienna")
DROPPED = {
    "malformed": fact(answer=" "),
    "answer_not_in_context": fact(context="It is Luxembourgish."),
    "not_known": fact(answer="Vaduz", context="It is Vaduz."),
    "no_other_answer": fact(kind="duchy"),
    "same_first_token": fact(
        question="What is the capital city of Peru",
        context="It is Lima.",
        answer="Lima",
        kind="city",
    ),
    "too_long": fact(context=f"It is Luxembourg {'and so on ' * 600}."),
}


@pytest.mark.parametrize("reason", DROPPED)
def test_every_row_that_is_dropped_is_counted_with_its_reason(
    mini: SteeredModel, reason: str
) -> None:
    city = fact(question="Who knows", context="Nobody knows Loma.", answer="Loma", kind="city")
    made = make_conflicts(mini, rows(fact(), DROPPED[reason], OTHER, city))
    assert len(made.examples) == 1
    others = {"not_known": 2}  # OTHER and the city
    expected = {**others, reason: others.get(reason, 0) + 1}
    assert {r: n for r, n in made.dropped.items() if n} == expected


@pytest.mark.parametrize("other", ["Luxembourg City", "luxembourg", "Luxe", "Grand Duchy"])
def test_an_answer_that_is_part_of_an_accepted_one_or_holds_it_is_not_swapped_in(
    mini: SteeredModel, other: str
) -> None:
    question = fact(answer=["Luxembourg", "Grand Duchy of Luxembourg"])
    made = make_conflicts(
        mini,
        rows(
            fact(kind="rare"),
            question,
            {**OTHER, "answer": other},
            {**OTHER, "answer": "Vienna", "kind": "rare"},
        ),
    )
    assert made.dropped["no_other_answer"] == 1


def test_a_question_too_long_to_ask_is_counted_and_not_asked(mini: SteeredModel) -> None:
    made = make_conflicts(mini, rows(fact(), OTHER, fact(question="why " * 600)))
    assert made.dropped["too_long"] == 1


def test_a_passage_of_one_sentence_gives_no_coherent_prompt(mini: SteeredModel) -> None:
    made = make_conflicts(mini, rows(fact(), fact(context="The capital is  Luxembourg."), OTHER))
    assert [set(e.prompts) for e in made.examples] == [
        {"clean", "substitution", "coherent"},
        {"clean", "substitution"},
    ]
    assert made.n_without_coherent == 1


def test_without_a_single_example_the_error_counts_the_reasons(mini: SteeredModel) -> None:
    with pytest.raises(
        ExampleError,
        match=(
            r"no conflict example can be made: 1 lack a question.*; 1 ask what the model does not"
            r" know"
        ),
    ):
        make_conflicts(mini, rows(OTHER, DROPPED["malformed"]))


@pytest.mark.parametrize("popularity", [float("nan"), "nan", "inf", None, "many"])
def test_a_popularity_that_is_no_number_is_none(mini: SteeredModel, popularity: object) -> None:
    """Rows of a table of pandas have NaN where they have nothing."""
    data = [{**row, "popularity": popularity} for row in languages()[:8]]
    made = make_conflicts(mini, rows(*data))
    assert made.examples
    assert {e.popularity for e in made.examples} == {None}
