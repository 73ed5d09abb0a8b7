"""What the first sentence of a reply is, and whether it gives an answer."""

from __future__ import annotations

import pytest

from juice.data.example import ConflictExample
from juice.data.passages import first_sentence, lead_to, verdict

PERU = "What is the capital of Peru?"
LUXEMBOURG = "What is the capital of Luxembourg?"


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (" Lima.", "Lima."),
        ("The capital of Peru is Lima. It lies on the coast.", "The capital of Peru is Lima."),
        ("\n\nLima\nQuestion: Who?", "Lima"),
        ("Lima\nIt lies on the coast.", "Lima"),
        ("Sure! The capital is Lima. Yes.", "The capital is Lima."),
        ("Certainly.\n\nThe capital is Lima.", "The capital is Lima."),
        ("Great question! Sure thing! It is Lima!", "It is Lima!"),
        ("I'd be happy to help! Lima.", "Lima."),
        ("Here is the answer:\n\nLima. Yes.", "Here is the answer: Lima."),
        ("**Answer:**\nLima", "**Answer:** Lima"),
        ("It is St. John's. Yes.", "It is St. John's."),
        ("It has 3.5 million people. Yes.", "It has 3.5 million people."),
        ("答案是北京。不是上海。", "答案是北京。"),
        ("Sure!", "Sure!"),
        ("", ""),
        (" \n ", ""),
    ],
)
def test_the_first_sentence_is_the_first_one_that_says_something(reply: str, sentence: str) -> None:
    assert first_sentence(reply) == sentence


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Lima.", "given"),
        ("The capital of Peru is Lima.", "given"),
        ("The capital of Peru is **Lima**.", "given"),
        ("The capital of Peru is the LIMA!", "given"),
        ("As far as I can tell from all that I have read, it is “Lima”", "given"),
        ("Peru's capital, Lima, lies on the coast.", "given"),
        ("Lima's the capital.", "given"),
        ("The capital of Peru is Lima, not Cusco.", "given"),
        ("It is Lima rather than Cusco.", "given"),
        ("The capital is Lima, which is not far from the sea.", "given"),
        ("The capital is Limassol.", "absent"),
        ("The capital is Cusco.", "absent"),
        ("The capital of Peru is Limarí", "absent"),
        ("", "absent"),
        ("The capital of Peru is not Lima.", "unclear"),
        ("The capital of Peru isn't Lima.", "unclear"),
        ("Lima is not the capital of Peru.", "unclear"),
        ("It is Cusco, not Lima.", "unclear"),
        ("It is Cusco rather than Lima.", "unclear"),
        ("Contrary to popular belief Lima is only the largest city.", "unclear"),
        ("I don't know, but it may be Lima.", "unclear"),
        ("The capital is Cusco or Lima.", "unclear"),
        ("It is either Lima or Arequipa.", "unclear"),
        ("Lima, or Arequipa.", "unclear"),
        ("The capitals are Cusco and Lima.", "unclear"),
        ("Lima and Cusco.", "unclear"),
        ("The capital moved from Lima to Cusco.", "unclear"),
    ],
)
def test_a_sentence_gives_an_answer_as_whole_words_undenied_and_alone(
    sentence: str, expected: str
) -> None:
    """Mistakes caught: parts of words, denials before and after, and two answers in one."""
    assert verdict(sentence, ["Lima"], others=["Cusco", "Peru"], question=PERU) == expected


@pytest.mark.parametrize(
    ("sentence", "accepted", "question", "expected"),
    [
        ("The capital of Luxembourg is Vaduz.", "Luxembourg", LUXEMBOURG, "absent"),
        ("The capital of Luxembourg is Luxembourg.", "Luxembourg", LUXEMBOURG, "given"),
        ("Luxembourg City.", "Luxembourg", LUXEMBOURG, "given"),
        ("It has 3.5 million.", "35", "", "absent"),
        ("It has 3.5 million.", "3.5", "", "given"),
        ("It has 1,000 towns.", "1000", "", "given"),
        ("It is at -5 degrees.", "5", "", "absent"),
        ("It is Bogotá.", "Bogota", "", "given"),
        ("It is Port-au-Prince.", "Port au Prince", "", "given"),
        ("It is N’Djamena.", "N'Djamena", "", "given"),
        ("It is Netherlands.", "The Netherlands", "", "given"),
        ("It is the Netherlands.", "Netherlands", "", "given"),
        ("答案是北京。", "北京", "", "given"),
        ("수도는 서울입니다.", "서울", "", "given"),
        ("No, it is not.", "No", "", "given"),
        ("The one not in Asia is Lima.", "Lima", "Which one is not in Asia?", "given"),
        ("It is Lima.", "Lima", "Is it Lima or Cusco?", "absent"),
        ("Lima.", "Lima", "Is it Lima or Cusco?", "given"),
        ("Anything.", "...", "", "absent"),
    ],
)
def test_words_of_the_question_do_not_count_and_spelling_does_not_matter(
    sentence: str, accepted: str, question: str, expected: str
) -> None:
    assert verdict(sentence, [accepted], question=question) == expected


def test_several_accepted_answers_may_be_given_together() -> None:
    both = "The official languages are Spanish and Quechua."
    assert verdict(both, ["Spanish", "Quechua"], others=["Aymara"]) == "given"
    assert verdict(both, ["Spanish"], others=["Quechua"]) == "unclear"


@pytest.mark.parametrize(
    ("sentence", "answer", "question", "lead"),
    [
        ("The capital of Peru is Lima.", "Lima", PERU, "The capital of Peru is"),
        ("The capital is **Lima**.", "Lima", PERU, "The capital is"),
        ("Lima.", "Lima", PERU, ""),
        ("**Lima**", "Lima", PERU, ""),
        (
            "Luxembourg's capital is Luxembourg.",
            "Luxembourg",
            LUXEMBOURG,
            "Luxembourg's capital is",
        ),
        ("It is Bogotá.", "Bogota", "", None),
    ],
)
def test_the_lead_is_what_is_said_before_the_answer(
    sentence: str, answer: str, question: str, lead: str | None
) -> None:
    assert lead_to(sentence, answer, question=question) == lead


def test_an_example_of_this_rule_is_right_for_one_target_at_most() -> None:
    example = ConflictExample(
        subject="Peru",
        parametric_answer="Lima",
        context_answer="Cusco",
        prompts={"clean": PERU},
        question=PERU,
        match="sentence",
    )
    for reply, right in (
        ("The capital of Peru, as everybody knows, is Lima.", ["parametric"]),
        ("According to the text that you gave me, it is Cusco.", ["context"]),
        ("The text says Cusco, but it is Lima.", []),
        ("It is Cusco, not Lima.", ["context"]),
        ("It is Oslo. Lima.", []),
    ):
        assert [t for t in ("parametric", "context") if example.is_right(reply, t)] == right
    assert example.max_tokens == 48
