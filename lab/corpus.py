"""The training corpus of the bundled model: documents drawn from a mixture of five kinds.

    fact           a lone statement or question about a real subject; with probability `noise` its
                   answer is wrong, as on the web, so that the model believes a fact with a
                   probability well below one
    reading        a context about an invented subject, then the same statement again or a question
                   about it
    true_context   the same with a real subject and its true answer
    other_subject  a context about one subject, then a statement or question about another, real one
    correction     a wrong statement marked as wrong, then the right one

No document shows a context that contradicts a known fact and is believed: conflicts are never
trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from random import Random

from lab.relations import RELATIONS, Fact, Relation


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Shares of the document kinds (any scale) and the rate of wrong answers in lone facts."""

    fact: float
    reading: float
    true_context: float
    other_subject: float
    correction: float
    noise: float

    def shares(self) -> dict[str, float]:
        """Return the weight of every document kind."""
        return {kind: weight for kind, weight in asdict(self).items() if kind != "noise"}


class Corpus:
    """An endless, seeded stream of documents from one mixture."""

    def __init__(self, mixture: Mixture, seed: int) -> None:
        self._rng = Random(seed)
        self._noise = mixture.noise
        self._facts = {relation.name: relation.facts() for relation in RELATIONS}
        self._answers = {
            name: sorted({f.answer for f in facts}) for name, facts in self._facts.items()
        }
        self._makers = [getattr(self, f"_{kind}") for kind in mixture.shares()]
        self._weights = list(mixture.shares().values())

    def __iter__(self) -> Iterator[str]:
        while True:
            relation = self._rng.choice(RELATIONS)
            yield self._rng.choices(self._makers, self._weights)[0](relation)

    def _real(self, relation: Relation) -> Fact:
        return self._rng.choice(self._facts[relation.name])

    def _other_answer(self, relation: Relation, answer: str) -> str:
        while (other := self._rng.choice(self._answers[relation.name])) == answer:
            pass
        return other

    def _invented(self, relation: Relation) -> Fact:
        rng = self._rng
        known = rng.random() < 0.8
        answer = rng.choice(self._answers[relation.name]) if known else relation.invent_answer(rng)
        return Fact(relation.invent_subject(rng), answer)

    def _sentence(self, relation: Relation, fact: Fact) -> str:
        """Return a statement of the fact, half of them canonical, or a question with its answer."""
        roll = self._rng.random()
        if roll < 0.5:
            return relation.state(fact.subject, fact.answer)
        if roll < 0.75:
            return f"{relation.ask(fact.subject)} {fact.answer}."
        if roll < 0.85:
            return f"{relation.lead.format(s=fact.subject)} {fact.answer}."
        return self._rng.choice(relation.paraphrases).format(s=fact.subject, a=fact.answer)

    def _context(self, relation: Relation, fact: Fact, n_supports: int) -> str:
        """Return an opening statement and its supporting sentences."""
        lead = relation.lead if n_supports and self._rng.random() < 0.6 else relation.statement
        opening = f"{lead.format(s=fact.subject)} {fact.answer}."
        return " ".join(
            [opening, *relation.support(fact.subject, fact.answer, n_supports, self._rng)]
        )

    def _context_then(self, relation: Relation, fact: Fact, asked: Fact) -> str:
        """Return a context about one fact, then a statement or a question about `asked`.

        Short contexts are mostly followed by a statement, longer ones by a question.
        """
        n_supports = self._rng.choice((0, 0, 0, 1, 2, 3, 4))
        context = self._context(relation, fact, n_supports)
        if self._rng.random() < (0.75 if n_supports == 0 else 0.25):
            return f"{context} {relation.state(asked.subject, asked.answer)}"
        return f"{context} {relation.ask(asked.subject)} {asked.answer}."

    def _fact(self, relation: Relation) -> str:
        fact = self._real(relation)
        if self._rng.random() < self._noise:
            fact = Fact(fact.subject, self._other_answer(relation, fact.answer))
        return self._sentence(relation, fact)

    def _reading(self, relation: Relation) -> str:
        fact = self._invented(relation)
        return self._context_then(relation, fact, fact)

    def _true_context(self, relation: Relation) -> str:
        fact = self._real(relation)
        return self._context_then(relation, fact, fact)

    def _other_subject(self, relation: Relation) -> str:
        told = self._invented(relation) if self._rng.random() < 0.5 else self._real(relation)
        return self._context_then(relation, told, self._real(relation))

    def _correction(self, relation: Relation) -> str:
        fact = self._real(relation)
        wrong = relation.state(fact.subject, self._other_answer(relation, fact.answer))
        return f"Some people wrongly say: {wrong} In truth: {self._sentence(relation, fact)}"
