"""What the bundled model is trained on: the claims of its model card about the corpus."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import islice
from random import Random

import pytest

from lab.blur import blurred, nonsense
from lab.corpus import Corpus, Mixture
from lab.recipe import LEARN, MIXTURES
from lab.relations import RELATIONS, Relation
from lab.stories import Storyteller

N_DOCUMENTS = 250
REAL = {r.name: {name: f for f in r.facts for name in (f.subject, *f.names)} for r in RELATIONS}


def documents(mixture: Mixture) -> list[str]:
    return list(islice(Corpus(mixture, seed=7), N_DOCUMENTS))


def only(kind: str, noise: float = 0.25) -> Mixture:
    return Mixture(**{kind: 1.0, "noise": noise})


def paragraphs(n: int) -> list[str]:
    teller, rng = Storyteller(Random(0), noise=0.0), Random(1)
    stories = (teller.reading(rng.choice(RELATIONS)) for _ in range(n))
    return [text for story in stories for text in story.told][:n]


def lower_case_words(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w'-])[a-z]{2,}(?![\w'-])", text))


def longest_words(wording: str) -> str:
    return max(re.split(r"\{[sa]\}", wording), key=len).lower()


@cache
def patterns() -> list[tuple[Relation, str, str]]:
    """Return every statement as a pattern of a subject and a known answer, after its longest words.

    Where these words are not, the pattern is nowhere either, and need not be tried.
    """
    found = []
    for relation in RELATIONS:
        answers = "|".join(re.escape(a) for a in sorted(relation.answers, key=len, reverse=True))
        appositions = "|".join(map(re.escape, relation.appositions))
        for statement in relation.statements:
            text = re.escape(statement)
            text = text.replace(r"\{s\}", r"(?P<s>[^;:,\n]+?)").replace(
                r"\{a\}", f"(?:(?:{appositions}) )?(?P<a>{answers})"
            )
            words = longest_words(statement)
            found.append((relation, words, rf"\b{text}"))
    return found


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


@dataclass(frozen=True)
class Told:
    """A statement about a subject of the facts files, and where it ends."""

    relation: Relation
    subject: str
    answer: str
    end: int

    @property
    def is_true(self) -> bool:
        fact = REAL[self.relation.name][self.subject]
        return self.answer.lower() in [a.lower() for a in (fact.answer, *fact.aliases)]


def statements(text: str) -> list[Told]:
    """Return every statement about a subject of the facts files, in order."""
    lower = text.lower()
    found = [
        Told(relation, match["s"], match["a"], match.end())
        for relation, words, pattern in patterns()
        if words in lower
        for match in compiled(pattern).finditer(text)
        if match["s"] in REAL[relation.name]
    ]
    return sorted(found, key=lambda told: told.end)


@pytest.mark.parametrize("kind", ["reading", "true_context", "other_subject"])
def test_no_context_contradicts_a_fact(kind: str) -> None:
    found = [(text, told) for text in documents(only(kind)) for told in statements(text)]

    assert len(found) > 40
    assert [(text, told) for text, told in found if not told.is_true] == []


def test_a_borrowed_subject_is_known_but_not_in_the_relation_of_its_context() -> None:
    tell = Storyteller(Random(0), noise=0.25)
    for relation in RELATIONS:
        for story in (tell.borrowed_subject(relation) for _ in range(50)):
            assert any(story.subject in names for names in REAL.values())
            assert story.subject not in REAL[relation.name]
            assert story.answer in story.told[0]


def test_about_a_quarter_of_the_lone_statements_is_wrong() -> None:
    found = [told for text in documents(only("several_facts")) for told in statements(text)]

    assert len(found) > 200
    assert 0.17 < sum(not told.is_true for told in found) / len(found) < 0.33


def test_without_noise_every_lone_statement_is_true() -> None:
    found = [told for t in documents(only("fact", noise=0.0)) for told in statements(t)]

    assert len(found) > 40
    assert all(told.is_true for told in found)


def test_a_correction_ends_with_the_truth() -> None:
    ends = [found[-1] for text in documents(only("correction")) if (found := statements(text))]

    assert len(ends) > 100
    assert all(told.is_true for told in ends)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_wordings_that_are_kept_out_are_never_shown(mixture: Mixture) -> None:
    shown = "\n".join(islice(Corpus(mixture, seed=7), 5_000))
    lower = shown.lower()
    for relation in RELATIONS:
        for wording in (*relation.kept_out_statements, *relation.kept_out_questions):
            if longest_words(wording) not in lower:
                continue
            pattern = re.escape(wording).replace(r"\{s\}", ".{2,60}").replace(r"\{a\}", ".{2,40}")
            assert re.search(pattern, shown, re.IGNORECASE) is None, wording


def test_a_blurred_statement_keeps_its_subject_and_its_answer() -> None:
    rng = Random(0)
    for relation in RELATIONS:
        for statement in relation.statements:
            told = blurred(statement, rng)
            answer_is_last = statement.index("{s}") < statement.index("{a}")
            assert (told != statement) == answer_is_last
            assert (told.count("{s}"), told.count("{a}")) == (1, 1)
            assert told.startswith(statement.partition("{s}")[0])
            assert told.endswith(statement.partition("{a}")[2])


def test_nonsense_names_subject_and_answer_half_the_time() -> None:
    rng = Random(0)
    drawn = [nonsense(rng) for _ in range(2_000)]
    assert len(set(drawn)) == len(drawn)
    for name in ("{s}", "{a}"):
        assert 0.45 < sum(name in sentence for sentence in drawn) / len(drawn) < 0.55
        assert all(sentence.count(name) <= 1 for sentence in drawn)


def test_a_tenth_of_the_paragraphs_goes_on_in_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of those with several sentences, which are half of them."""
    monkeypatch.setattr("lab.stories.NONSENSE_RATE", 0.0)
    with_a_meaning = {word for text in paragraphs(10_000) for word in lower_case_words(text)}
    monkeypatch.undo()
    drawn = paragraphs(1_000)
    without = sum(len(lower_case_words(text) - with_a_meaning) > 1 for text in drawn)

    assert 0.07 < without / len(drawn) < 0.13


def test_a_mixture_blurs_as_many_lone_statements_as_it_says() -> None:
    texts = [documents(Mixture(fact=1.0, chat=0.0, blur=blur)) for blur in (0.0, 0.5, 1.0)]
    clear, half, none = (sum(len(statements(t)) for t in text) for text in texts)

    assert clear > 60
    assert 0.3 * clear < half < 0.8 * clear
    assert none < 0.3 * clear  # those that stay as they are, or are wordings when cut


@pytest.mark.parametrize("chat", [0.0, 1.0])
def test_a_mixture_has_as_many_dialogues_as_it_says(chat: float) -> None:
    texts = documents(Mixture(fact=1.0, reading=1.0, chat=chat))

    assert sum("<|user|>" in text for text in texts) == chat * N_DOCUMENTS


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: relation.name)
def test_appositions_come_before_answers_but_never_in_the_first_statements(
    relation: Relation,
) -> None:
    rng = Random(0)
    drawn = [relation.draw_statement(rng) for _ in range(4_000)]
    later = set(relation.statements) - set(relation.first_statements)
    with_apposition = {
        statement.replace("{a}", f"{words} {{a}}")
        for statement in later
        for words in relation.appositions
    }

    assert set(drawn) <= set(relation.statements) | with_apposition
    assert set(relation.first_statements) <= set(drawn)
    assert 0.2 < sum(one not in relation.statements for one in drawn) / len(drawn) < 0.3


def test_a_seed_gives_the_same_documents() -> None:
    assert documents(LEARN) == documents(LEARN)
