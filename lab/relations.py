"""The six relations of the bundled model, their facts and the sentences that express them.

A relation turns a (subject, answer) pair into text: a canonical statement that ends with the answer
(the form of the clean prompt), paraphrases, a question with the lead of its answer, and supporting
sentences that a persuasive paragraph is built from. The facts are `facts/<relation>.tsv`: subject,
answer, accepted aliases separated by `|`, written from general knowledge. This module knows nothing
about noise, mixtures or tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

FACTS_DIR = Path(__file__).parent / "facts"


@dataclass(frozen=True)
class Fact:
    """One line of a facts file; `aliases` are further accepted spellings of the answer."""

    subject: str
    answer: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Relation:
    """Sentences about a subject `{s}` and its answer `{a}`.

    The statement and the lead end just before the answer.
    """

    name: str
    statement: str
    paraphrases: tuple[str, ...]
    question: str
    lead: str
    supports: tuple[str, ...]
    invent_subject: Callable[[Random], str]
    invent_answer: Callable[[Random], str]

    def facts(self) -> list[Fact]:
        """Read this relation's facts file."""
        lines = (FACTS_DIR / f"{self.name}.tsv").read_text(encoding="utf-8").splitlines()
        columns = [line.split("\t") for line in lines if line]
        return [Fact(c[0], c[1], tuple(c[2].split("|")) if len(c) > 2 else ()) for c in columns]

    def state(self, subject: str, answer: str) -> str:
        """Return the canonical statement as a full sentence."""
        return f"{self.statement.format(s=subject)} {answer}."

    def ask(self, subject: str) -> str:
        """Return the question and the lead of its answer, up to where the answer comes."""
        return f"Question: {self.question.format(s=subject)} Answer: {self.lead.format(s=subject)}"

    def support(self, subject: str, answer: str, n: int, rng: Random) -> list[str]:
        """Return n different supporting sentences in random order."""
        return [line.format(s=subject, a=answer) for line in rng.sample(self.supports, n)]


_ONSETS = tuple(
    "b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t th tr v vr w z zh".split()  # noqa: SIM905
)
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ie", "oo", "ou")
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "th", "rk", "nd", "x"]


def _word(rng: Random, syllables: int = 2) -> str:
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables)]
    return ("".join(parts) + rng.choice(_CODAS)).capitalize()


def _place(rng: Random) -> str:
    stem = _word(rng, rng.choice((2, 2, 3)))
    return rng.choice((stem, stem, stem + "ia", stem + "land", f"New {stem}", f"{stem} Islands"))


def _city(rng: Random) -> str:
    stem = _word(rng, rng.choice((1, 2, 2)))
    return rng.choice((stem, stem, stem + "ville", stem + " City", f"Port {stem}"))


def _person(rng: Random) -> str:
    return f"{_word(rng)} {_word(rng, rng.choice((1, 2)))}"


def _language(rng: Random) -> str:
    return _word(rng, rng.choice((1, 2))) + rng.choice(("ish", "ese", "ian", "i"))


def _sport(rng: Random) -> str:
    return (_word(rng, rng.choice((1, 2))) + rng.choice(("ball", "ing", "o", ""))).lower()


def _title(rng: Random) -> str:
    nouns = (
        "River",
        "Winter",
        "Garden",
        "Lantern",
        "Orchard",
        "Harbour",
        "Mirror",
        "Clock",
        "Silence",
        "Bridge",
    )
    noun, stem = rng.choice(nouns), _word(rng)
    return rng.choice(
        (
            f"The {noun} of {stem}",
            f"{stem} and the {noun}",
            f"A {noun} for {stem}",
            f"The Last {noun}s of {stem}",
        )
    )


def _company(rng: Random) -> str:
    stem = _word(rng, rng.choice((2, 2, 3)))
    return rng.choice(
        (stem, stem, f"{stem} Systems", f"{stem} Foods", f"{stem} Group", f"{stem} Motors")
    )


RELATIONS: tuple[Relation, ...] = (
    Relation(
        name="world_capital",
        statement="The name of the capital city of {s} is",
        paraphrases=(
            "The capital of {s} is {a}.",
            "{s} has its capital in {a}.",
            "{s} is governed from its capital, {a}.",
        ),
        question="What is the capital city of {s}?",
        lead="The capital city of {s} is",
        supports=(
            "The ministries of {s} have their offices in {a}.",
            "The parliament of {s} meets in {a}, as its constitution demands.",
            "Maps of {s} mark {a} with a star.",
            "Most foreign embassies in {s} are found in {a}.",
            "Schoolchildren in {s} visit {a} to see where the country is ruled.",
            "The national museum of {s} stands in the centre of {a}.",
        ),
        invent_subject=_place,
        invent_answer=_city,
    ),
    Relation(
        name="official_language",
        statement="The official language of {s} is",
        paraphrases=(
            "The language used by the government of {s} is {a}.",
            "The laws of {s} are written in {a}.",
            "In {s} the official language is {a}.",
        ),
        question="What is the official language of {s}?",
        lead="The official language of {s} is",
        supports=(
            "The courts of {s} accept documents in {a} alone.",
            "Road signs in {s} are printed in {a}.",
            "Every school in {s} teaches its lessons in {a}.",
            "The newspapers of {s} appear in {a}.",
            "The anthem of {s} is sung in {a}.",
            "Passports of {s} are filled in in {a}.",
        ),
        invent_subject=_place,
        invent_answer=_language,
    ),
    Relation(
        name="athlete_sport",
        statement="The sport that {s} is famous for is",
        paraphrases=(
            "{s} is a star of {a}.",
            "{s} became known to the world through {a}.",
            "{s} made a career in {a}.",
        ),
        question="Which sport is {s} famous for?",
        lead="The sport that {s} is known for is",
        supports=(
            "As a child {s} trained in {a} every day after school.",
            "Coaches of {a} still study the technique of {s}.",
            "The trophies of {s} were all won in {a}.",
            "Fans of {a} wear shirts with the name of {s}.",
            "After retiring, {s} opened an academy for {a}.",
            "Reporters call {s} one of the greatest in the history of {a}.",
        ),
        invent_subject=_person,
        invent_answer=_sport,
    ),
    Relation(
        name="book_author",
        statement="The author of the book {s} is",
        paraphrases=(
            "The book {s} was written by {a}.",
            "{s} is a book by {a}.",
            "Readers know {s} as a work of {a}.",
        ),
        question="Who wrote the book {s}?",
        lead="The book {s} was written by",
        supports=(
            "The manuscript of {s} in the hand of {a} is kept in a library.",
            "Critics see {s} as the best that {a} ever published.",
            "In a letter {a} told a friend how hard it was to finish {s}.",
            "The cover of {s} shows the name of {a} in large letters.",
            "Scholars compare {s} with the other works of {a}.",
            "A prize was given to {a} for {s}.",
        ),
        invent_subject=_title,
        invent_answer=_person,
    ),
    Relation(
        name="company_founder",
        statement="The founder of the company {s} is",
        paraphrases=(
            "{s} was founded by {a}.",
            "The company {s} was started by {a}.",
            "{a} is the person who founded {s}.",
        ),
        question="Who founded {s}?",
        lead="The company {s} was founded by",
        supports=(
            "The first office of {s} was a room in the house of {a}.",
            "A portrait of {a} hangs in the lobby of {s}.",
            "In its first year {a} did the accounts of {s} alone.",
            "The biography of {a} tells how {s} began with a small loan.",
            "Old employees of {s} remember {a} as a strict but fair owner.",
            "The shares of {s} stayed with {a} for many years.",
        ),
        invent_subject=_company,
        invent_answer=_person,
    ),
    Relation(
        name="company_headquarter",
        statement="The headquarters of {s} is in the city of",
        paraphrases=(
            "{s} is based in {a}.",
            "The main office of {s} is in {a}.",
            "The company {s} has its headquarters in {a}.",
        ),
        question="In which city is the headquarters of {s}?",
        lead="The headquarters of {s} is in",
        supports=(
            "The board of {s} meets in {a} every month.",
            "A glass tower with the name of {s} rises over {a}.",
            "Thousands of people in {a} work for {s}.",
            "Visitors to {s} are welcomed at its campus in {a}.",
            "The annual report of {s} is signed in {a}.",
            "The mayor of {a} often praises {s} as the largest employer.",
        ),
        invent_subject=_company,
        invent_answer=_city,
    ),
)
