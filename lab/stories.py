"""What documents tell: real and invented subjects, and contexts about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from lab.blur import nonsense
from lab.relations import RELATIONS, Fact, Relation, fill, read_wordings

SHARED = read_wordings("shared")
NONSENSE_RATE = 0.2


@dataclass(frozen=True)
class Story:
    """What a document tells (paragraphs), what it asks about, and the answer that it gives.

    `wording` is the statement that the context used for this subject, if any.
    """

    relation: Relation
    subject: str
    answer: str
    told: tuple[str, ...] = ()
    wording: str | None = None


class Storyteller:
    """Draws stories; a lone fact is told wrongly with a probability around `noise`."""

    def __init__(self, rng: Random, noise: float) -> None:
        self._rng = rng
        self._noise = noise

    def fact(self, relation: Relation) -> Story:
        fact = self._rng.choice(relation.facts)
        return Story(relation, self.name(fact), self.noisy_answer(relation, fact))

    def reading(self, relation: Relation) -> Story:
        return self._about(relation, relation.invent(self._rng))

    def true_context(self, relation: Relation) -> Story:
        """A true answer of several is told as often as not: which one, only the context says."""
        fact = self._rng.choice(relation.facts)
        if fact.aliases and self._rng.random() < 0.5:
            fact = replace(fact, answer=self._rng.choice(fact.aliases))
        return self._about(relation, fact)

    def borrowed_subject(self, relation: Relation) -> Story:
        """A known subject gets an answer of a relation in which nothing is known of it.

        In one sentence: a model trusts paragraphs more than sentences anyway.
        """
        rng, known = self._rng, set(relation.names)
        while (subject := rng.choice(rng.choice(RELATIONS).names)) in known:
            pass
        answer, wording = relation.invent(rng).answer, relation.draw_statement(rng)
        told = self.statement(wording, subject, answer)
        return Story(relation, subject, answer, (told,), wording)

    def other_subject(self, relation: Relation) -> Story:
        fact = self._rng.choice(relation.facts)
        told = [self._distractor(relation, fact) for _ in range(max(1, self._n_distractors()))]
        return Story(relation, self.name(fact), fact.answer, tuple(told))

    def _about(self, relation: Relation, fact: Fact) -> Story:
        subject = self.name(fact)
        wording = relation.draw_statement(self._rng)
        told = [self._distractor(relation, fact) for _ in range(self._n_distractors())]
        paragraph = self._paragraph(relation, subject, fact.answer, wording)
        told.insert(self._rng.randint(0, len(told)), paragraph)
        return Story(relation, subject, fact.answer, tuple(told), wording)

    def name(self, fact: Fact) -> str:
        if fact.names and self._rng.random() < 0.4:
            return self._rng.choice(fact.names)
        return fact.subject

    def noisy_answer(self, relation: Relation, fact: Fact) -> str:
        """Return the fact's answer, or a wrong one as often as this fact is told wrongly."""
        rate = self._noise * (0.2 + 1.6 * Random(fact.subject).random())
        if self._rng.random() < rate:
            return relation.other_answer(fact, self._rng)
        if fact.aliases and self._rng.random() < 0.15:
            return self._rng.choice(fact.aliases)
        return fact.answer

    def _n_distractors(self) -> int:
        roll = self._rng.random()
        if roll < 0.75:
            return 0
        if roll < 0.993:
            return self._rng.choice((1, 1, 1, 2, 2, 3))
        return self._rng.randint(6, 18)

    def _distractor(self, relation: Relation, apart_from: Fact) -> str:
        """Return a paragraph about another subject, invented or real, mostly of this relation."""
        rng = self._rng
        if rng.random() < 0.2:
            relation = rng.choice(RELATIONS)
        while True:
            fact = relation.invent(rng) if rng.random() < 0.5 else rng.choice(relation.facts)
            if fact.subject != apart_from.subject:
                break
        wording = relation.draw_statement(rng)
        return self._paragraph(relation, self.name(fact), fact.answer, wording)

    def _paragraph(self, relation: Relation, subject: str, answer: str, wording: str) -> str:
        """Return one to six sentences that begin, mostly, with the statement `wording`.

        At times the others mean nothing.
        """
        rng = self._rng
        sentences = [self.statement(wording, subject, answer)]
        n_more = rng.choice((0, 0, 0, 0, 0, 1, 2, 3, 4, 5))
        n_supports = rng.randint(0, n_more)
        more = rng.sample(relation.supports, n_supports)
        more += rng.sample((*relation.fillers, *SHARED["fillers"]), n_more - n_supports)
        rng.shuffle(more)
        if rng.random() < NONSENSE_RATE:
            more = [nonsense(rng) for _ in more]
        sentences += [fill(wording, subject, answer) for wording in more]
        if n_more and rng.random() < 0.15:
            sentences.insert(1, sentences.pop(0))
        return " ".join(sentences)

    def statement(self, wording: str, subject: str, answer: str) -> str:
        """Return a statement, at times with an opener such as "According to a guide book,"."""
        text = fill(wording, subject, answer)
        if self._rng.random() >= 0.15:
            return text
        opener = self._rng.choice(SHARED["openers"])
        if not opener.endswith(":") and text.startswith(("The ", "In ", "As ", "On ", "By ")):
            text = text[0].lower() + text[1:]
        return f"{opener} {text}"
