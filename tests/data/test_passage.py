"""Answers as text: their kind, where a passage has them, the sentences that hold them."""

from __future__ import annotations

import pytest

from juice.data.judging import kind_of
from juice.data.passages import find, replace, sentences_with


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("1969", "date"), ("1960s", "date"), ("44 BC", "date"), ("May 5, 1990", "date"),
        ("5 May", "date"), ("July", "date"), ("2001-09-11", "date"),
        ("42", "number"), ("3.5", "number"), ("1,234,567", "number"), ("$40", "number"),
        ("12 %", "number"), ("-3", "number"), ("7 million", "number"), ("10000", "number"),
        ("Lima", "name"), ("the United States of America", "name"), ("Vincent van Gogh", "name"),
        ("Apollo 11", "name"), ('"Ulysses"', "name"),
        ("a red car", "other"), ("photosynthesis", "other"), ("the", "other"), ("ножом", "other"),
        ("42 is the answer", "other"),
    ],
)  # fmt: skip
def test_the_kind_of_an_answer_is_judged_by_its_form(answer: str, kind: str) -> None:
    assert kind_of(answer) == kind


@pytest.mark.parametrize(
    ("passage", "answers", "expected"),
    [
        (
            "Lima is old; lima beans, Limassol, LIMA.",
            ["Lima"],
            "<> is old; <> beans, Limassol, <>.",
        ),
        ("He told us of the US and the USA.", ["US"], "He told us of the <> and the USA."),
        ("New York City, New York and York", ["New York", "New York City"], "<>, <> and York"),
        (
            "It has 5 doors, 5.5 rooms, 1,5 cats, 15 mice and 5.",
            ["5"],
            "It has <> doors, 5.5 rooms, 1,5 cats, 15 mice and <>.",
        ),
        ("It cost $5 (five) in C++.", ["$5", "C++"], "It cost <> (five) in <>."),
        ("Zoë's house, Zoëlla", ["Zoë"], "<>'s house, Zoëlla"),
        ("Peru", ["Lima"], "Peru"),
        ("法国的首都是巴黎。", ["巴黎"], "法国的首都是<>。"),
        ("パリはフランスの首都です。", ["パリ"], "<>はフランスの首都です。"),
        ("เมืองหลวงคือปารีสครับ", ["ปารีส"], "เมืองหลวงคือ<>ครับ"),
        ("수도는 파리이다. 대파리", ["파리"], "수도는 <>이다. 대파리"),
        ("2008年创立Apple公司，不是Applet", ["2008", "Apple"], "<>年创立<>公司，不是Applet"),
        ("عاصمة مصر، وهو مصري", ["مصر"], "عاصمة <>، وهو مصري"),
    ],
)
def test_an_answer_is_replaced_wherever_it_occurs_as_whole_words(
    passage: str, answers: list[str], expected: str
) -> None:
    swapped, placed = replace(passage, find(passage, answers), "<>")
    assert swapped == expected
    assert [start for start, _ in placed] == [
        i for i in range(len(expected)) if expected.startswith("<>", i)
    ]


@pytest.mark.parametrize(
    ("passage", "answer", "expected"),
    [
        ("One. Two Lima. Three.", "Lima", "Two Lima."),
        ("Lima! Is it? No. Lima it is.", "Lima", "Lima! Lima it is."),
        ("Dr. J. Smith saw Lima. He left.", "Lima", "Dr. J. Smith saw Lima."),
        (
            "It is approx. two miles to Lima, e.g. by bus. So.",
            "Lima",
            "It is approx. two miles to Lima, e.g. by bus.",
        ),
        ('He said "Lima." Then he left.', "Lima", 'He said "Lima."'),
        ("They read Help! By Us. Then they slept.", "Help! By Us", "They read Help! By Us."),
        ("no stop at all in Lima", "Lima", "no stop at all in Lima"),
    ],
)
def test_the_sentences_that_hold_an_answer_are_whole(
    passage: str, answer: str, expected: str
) -> None:
    assert sentences_with(passage, find(passage, [answer])) == expected
