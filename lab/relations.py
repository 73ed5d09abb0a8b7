"""The relations of the bundled model: their facts, and the wordings that express them.

The facts are `juice/data/facts/<relation>.tsv` (subject and its other names, answer, accepted
aliases; several separated by `|`), written from general knowledge. The wordings are
`wordings/<relation>.toml`, with `{s}` for the subject and `{a}` for the answer; those kept out of
training measure what the model knows beyond the words that it learned with.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

from lab.invention import INVENTORS

FOLDER = Path(__file__).parent
FACTS = resources.files("juice.data") / "facts"
N_FIRST, APPOSITION_RATE = 3, 0.25


@dataclass(frozen=True)
class Fact:
    """One line of a facts file; `names` are the subject's other names, `aliases` the answer's."""

    subject: str
    answer: str
    aliases: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Relation:
    """Wordings about a subject `{s}` and its answer `{a}`.

    The first statement is the form of the clean prompt, the second follows "Answer:"; both end with
    the answer. `questions` ask, `phrases` name what is asked, `followups` speak of a subject that
    was named before, `supports` back an answer, `fillers` have none, `appositions` go before one.
    """

    name: str
    statements: tuple[str, ...]
    kept_out_statements: tuple[str, ...]
    questions: tuple[str, ...]
    kept_out_questions: tuple[str, ...]
    phrases: tuple[str, ...]
    heading: str
    label: str
    followups: tuple[str, ...]
    supports: tuple[str, ...]
    fillers: tuple[str, ...]
    appositions: tuple[str, ...]

    @property
    def first_statements(self) -> tuple[str, ...]:
        """The statements that answer in a full sentence, without any apposition."""
        return self.statements[:N_FIRST]

    def draw_statement(self, rng: Random) -> str:
        """Return a statement, at times with an apposition before its answer.

        So no wording announces the answer by its last words alone. The first ones stay as they are.
        """
        i = rng.randrange(len(self.statements))
        if i < N_FIRST or rng.random() >= APPOSITION_RATE:
            return self.statements[i]
        return self.statements[i].replace("{a}", f"{rng.choice(self.appositions)} {{a}}")

    @cached_property
    def facts(self) -> list[Fact]:
        """The lines of this relation's facts file."""
        file = FACTS / f"{self.name}.tsv"
        lines = file.read_text(encoding="utf-8").splitlines()
        return [_fact(*line.split("\t")) for line in lines if line]

    @cached_property
    def answers(self) -> list[str]:
        """All answers, sorted."""
        return sorted({fact.answer for fact in self.facts})

    def other_answer(self, fact: Fact, rng: Random) -> str:
        """Return an answer of this relation that is wrong for `fact`."""
        accepted = {fact.answer, *fact.aliases}
        while (other := rng.choice(self.answers)) in accepted:
            pass
        return other

    @cached_property
    def names(self) -> list[str]:
        """All subjects, under all their names, sorted."""
        return sorted({name for fact in self.facts for name in (fact.subject, *fact.names)})

    def invent(self, rng: Random) -> Fact:
        """Return an invented subject; a third resemble real ones, most answers are known ones."""
        new, like, answer = INVENTORS[self.name]
        subject = new(rng)
        if rng.random() < 0.35:
            while (subject := like(self.names, rng)) in self.names:
                pass
        return Fact(subject, rng.choice(self.answers) if rng.random() < 0.8 else answer(rng))


def _fact(subjects: str, answer: str, aliases: str = "") -> Fact:
    subject, *names = subjects.split("|")
    return Fact(subject, answer, tuple(aliases.split("|")) if aliases else (), tuple(names))


def fill(wording: str, subject: str, answer: str = "") -> str:
    """Return a wording about this subject and answer, its first letter a capital."""
    text = wording.format(s=subject, a=answer)
    return text[:1].upper() + text[1:]


def opened(statement: str, subject: str) -> str:
    """Return a statement up to the answer that it ends with."""
    return fill(statement.removesuffix(" {a}."), subject)


def read_wordings(name: str) -> dict[str, Any]:
    """Read `wordings/<name>.toml`, its lists as tuples."""
    with (FOLDER / "wordings" / f"{name}.toml").open("rb") as file:
        return {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in tomllib.load(file).items()
        }


def _relation(name: str) -> Relation:
    """Read a relation; the statements that all share, about each of its phrases, come last."""
    wordings = read_wordings(name)
    shared = read_wordings("shared")["statements"]
    wordings["statements"] += tuple(
        s.replace("{x}", x) for s in shared for x in wordings["phrases"]
    )
    return Relation(name=name, **wordings)


RELATIONS: tuple[Relation, ...] = tuple(_relation(name) for name in INVENTORS)
