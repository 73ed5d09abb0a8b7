"""The subjects that models are asked about, and the wordings that ask."""

from __future__ import annotations

import re
import tomllib
from importlib import resources

import pytest

FACTS = resources.files("juice.data") / "facts"
WORDINGS = tomllib.loads((FACTS / "wordings.toml").read_text(encoding="utf-8"))
RELATIONS = sorted(
    each.name.removesuffix(".tsv") for each in FACTS.iterdir() if each.name.endswith(".tsv")
)
KINDS = {"statements": 5, "questions": 3, "beginnings": 6, "supports": 8}
N_ASKING = 3
PRONOUNS = {"it", "its", "he", "his", "him", "she", "her"}


def lines(relation: str) -> list[str]:
    return (FACTS / f"{relation}.tsv").read_text(encoding="utf-8").splitlines()


def fields(wording: str) -> list[str]:
    return re.findall(r"\{.*?\}", wording)


def test_every_relation_has_wordings_and_all_wordings_have_subjects() -> None:
    assert sorted(WORDINGS) == RELATIONS


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_relation_has_sixty_subjects_or_more_and_none_of_them_twice(relation: str) -> None:
    subjects = [re.split(r"[|\t]", line)[0].casefold() for line in lines(relation)]
    assert len(subjects) >= 60
    assert len(set(subjects)) == len(subjects)


@pytest.mark.parametrize("relation", RELATIONS)
def test_no_field_of_a_line_is_empty_or_padded(relation: str) -> None:
    for line in lines(relation):
        columns = line.split("\t")
        assert 1 <= len(columns) <= 3, line
        for name in (name for column in columns for name in column.split("|")):
            assert name, line
            assert name == name.strip(), line
            assert not {"{", "}"} & set(name), line


@pytest.mark.parametrize("relation", RELATIONS)
def test_wordings_come_in_their_number_and_none_of_them_twice(relation: str) -> None:
    wordings = WORDINGS[relation]
    assert {kind: len(wordings[kind]) for kind in wordings} == KINDS
    every = [each for kind in KINDS for each in wordings[kind]]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_statement_names_the_subject_once_and_ends_with_the_answer(relation: str) -> None:
    """It catches an answer that is named early, and one after an article of its own."""
    for statement in WORDINGS[relation]["statements"]:
        assert fields(statement) == ["{s}", "{a}"], statement
        assert statement.endswith(" {a}."), statement
        assert not statement.endswith((" a {a}.", " an {a}.")), statement


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_question_names_the_subject_alone(relation: str) -> None:
    for question in WORDINGS[relation]["questions"]:
        assert fields(question) == ["{s}"], question
        assert question.endswith("?"), question


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_beginning_names_the_subject_alone_and_ends_within_a_sentence(relation: str) -> None:
    for beginning in WORDINGS[relation]["beginnings"]:
        assert fields(beginning) == ["{s}"], beginning
        assert beginning[-1].isalpha() or beginning.endswith("}"), beginning


@pytest.mark.parametrize("relation", RELATIONS)
def test_each_support_names_the_answer_and_some_name_the_subject(relation: str) -> None:
    """None has a pronoun in the singular, which would be wrong for some of the subjects."""
    supports = WORDINGS[relation]["supports"]
    for support in supports:
        assert fields(support).count("{a}") == 1, support
        assert set(fields(support)) <= {"{s}", "{a}"}, support
        assert support.endswith("."), support
        assert not PRONOUNS & set(support.casefold().split()), support
    assert 3 <= sum("{s}" in support for support in supports) < len(supports)


@pytest.mark.parametrize("relation", RELATIONS)
def test_the_three_wordings_that_ask_open_differently(relation: str) -> None:
    openings = {each.split("{a}")[0] for each in WORDINGS[relation]["statements"][:N_ASKING]}
    assert len(openings) == N_ASKING
