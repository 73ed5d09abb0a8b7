"""The training corpus of the bundled model: documents drawn from a mixture of kinds.

    fact           a lone statement, question or dialogue about a real subject; with a probability
                   around `noise`, another for each fact, its answer is wrong, as on the web, so
                   that the model believes a fact with a probability well below one
    several_facts  a list or a paragraph of lone facts, wrong as often
    reading        a context about an invented subject, then a statement or a question about it
    true_context   the same with a real subject and its true answer
    other_subject  a context about other subjects than the real one that is asked about
    correction     a wrong statement marked as wrong, then the right one
    borrowed_subject
                   a sentence that gives a known subject an answer of a relation in which nothing is
                   known of it, such as the founder of a novel; then that statement again

A context is one to six sentences, some of which may mean nothing (`lab.blur`), or several such
paragraphs of which one matters. About two documents in five are dialogues. No document shows a
context that contradicts a known fact and is believed: conflicts are never trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from random import Random

from lab import chat
from lab.blur import blurred
from lab.relations import RELATIONS, Fact, Relation, fill, opened
from lab.stories import SHARED, Story, Storyteller

# The kinds that are dialogues more often than others.
CHAT_SHARES = {"other_subject": 0.6}


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Shares of the document kinds (any scale), and three rates.

    `noise` is that of wrong answers in lone facts, `blur` that of lone statements whose last words
    before the answer are any words at all (`lab.blur`), `chat` that of dialogues.
    """

    fact: float = 0.0
    several_facts: float = 0.0
    reading: float = 0.0
    true_context: float = 0.0
    other_subject: float = 0.0
    correction: float = 0.0
    borrowed_subject: float = 0.0
    noise: float = 0.0
    blur: float = 0.0
    chat: float = 0.4

    def shares(self) -> dict[str, float]:
        """Return the weight of every document kind."""
        rates = ("noise", "blur", "chat")
        return {kind: weight for kind, weight in asdict(self).items() if kind not in rates}


class Corpus:
    """An endless, seeded stream of documents from one mixture, with role and end tokens."""

    def __init__(self, mixture: Mixture, seed: int) -> None:
        self._rng = Random(seed)
        self._tell = Storyteller(self._rng, mixture.noise)
        self._blur, self._chat = mixture.blur, mixture.chat
        self._kinds = list(mixture.shares())
        self._weights = list(mixture.shares().values())

    def __iter__(self) -> Iterator[str]:
        while True:
            relation = self._rng.choice(RELATIONS)
            (kind,) = self._rng.choices(self._kinds, self._weights)
            if kind == "several_facts":
                yield _framed(self._several_facts(relation))
            elif kind == "correction":
                yield _framed(self._correction(relation))
            elif kind == "borrowed_subject":
                yield _framed(self._borrowed_subject(relation))
            else:
                story: Story = getattr(self._tell, kind)(relation)
                if self._rng.random() < CHAT_SHARES.get(kind, self._chat):
                    yield self._dialogue(story)
                else:
                    yield _framed(self._plain(story, self._continuation(story)))

    def _plain(self, story: Story, text: str) -> str:
        """Return what the story tells, if anything, and then the text."""
        rng = self._rng
        if not story.told:
            return text
        separator = rng.choice((" ", " ", "\n", "\n\n"))
        told = separator.join(self._numbered(story.told))
        form: str = rng.choice(SHARED["plain_contexts"])
        return form.format(c=told, q=text)

    def _numbered(self, told: tuple[str, ...]) -> list[str]:
        if len(told) > 1 and self._rng.random() < 0.4:
            return [f"Document {i}: {text}" for i, text in enumerate(told, 1)]
        return list(told)

    def _continuation(self, story: Story) -> str:
        """Return a statement or a question with its answer."""
        rng, relation = self._rng, story.relation
        subject, answer = story.subject, story.answer
        if rng.random() < (0.65 if story.told else 0.45):
            wording = story.wording
            if wording is None or rng.random() < 0.25:
                wording = relation.statements[0] if rng.random() < 0.25 else None
            wording = wording or relation.draw_statement(rng)
            if not story.told and self._blur and rng.random() < self._blur:
                wording = blurred(wording, rng)
            return self._tell.statement(wording, subject, answer)
        roll = rng.random()
        if roll < 0.1:
            return f"{fill(relation.label, subject)}: {answer}"
        question = self._ask(story)
        if roll < 0.64:
            return str(rng.choice(SHARED["plain_questions"])).format(q=question, a=answer)
        if roll < 0.67:
            lead = f"{opened(rng.choice(relation.first_statements), subject)} {answer}."
            return str(rng.choice(SHARED["plain_leads"])).format(q=question, lead=lead)
        return str(rng.choice(SHARED["plain_one_word"])).format(
            i=rng.choice(SHARED["one_word"]), q=question, a=answer
        )

    def _ask(self, story: Story) -> str:
        """Return a question or a request."""
        rng, relation = self._rng, story.relation
        if rng.random() < 0.7:
            return fill(rng.choice(relation.questions), story.subject)
        phrase = rng.choice(relation.phrases).format(s=story.subject)
        return str(rng.choice(SHARED["requests"])).format(x=phrase)

    def _dialogue(self, story: Story) -> str:
        """Return the story as a dialogue; the reply is short unless a sentence is asked for."""
        rng = self._rng
        system, documents, earlier = "", [], self._earlier_turns(story)
        if rng.random() < 0.3:
            system = rng.choice(SHARED["systems"])
        ask, instruction, reply = self._ask(story), "", f"{story.answer}."
        roll = rng.random()
        if roll < 0.3:
            instruction, reply = rng.choice(SHARED["one_word"]), story.answer
        elif roll < 0.45:
            instruction = rng.choice(SHARED["full_sentence"])
            reply = fill(rng.choice(story.relation.first_statements), story.subject, story.answer)
        if instruction and rng.random() < 0.25:
            system = f"{system} {instruction}".strip()
        elif instruction:
            ask = f"{ask} {instruction}" if rng.random() < 0.7 else f"{instruction} {ask}"
        if story.told:
            roll, told = rng.random(), "\n".join(self._numbered(story.told))
            if roll < 0.55:
                ask = str(rng.choice(SHARED["chat_contexts"])).format(c=told, q=ask)
            elif roll < 0.78:
                titled = rng.random() < 0.3
                documents = [
                    {"title": f"Document {i}", "text": text} if titled else {"text": text}
                    for i, text in enumerate(story.told, 1)
                ]
            elif roll < 0.9:
                form = str(rng.choice(SHARED["system_contexts"])).format(c=told)
                system = f"{form} {system}".strip()
            else:
                earlier += _turn(told, rng.choice(SHARED["acknowledgements"]))
        messages = [{"role": "system", "content": system}] if system else []
        return chat.render([*messages, *earlier, *_turn(ask, reply)], documents)

    def _earlier_turns(self, story: Story) -> list[dict[str, str]]:
        """Return, at times, a question about another subject and its answer."""
        if story.told or self._rng.random() >= 0.2:
            return []
        other = self._tell.fact(self._rng.choice(RELATIONS))
        return _turn(self._ask(other), f"{other.answer}.") if other.subject != story.subject else []

    def _several_facts(self, relation: Relation) -> str:
        """Return a list, or a paragraph, of lone facts."""
        rng = self._rng
        facts = rng.sample(relation.facts, rng.randint(2, 6))
        told = [(self._tell.name(f), self._tell.noisy_answer(relation, f)) for f in facts]
        roll = rng.random()
        if roll < 0.25:
            return "\n".join([f"{relation.heading}:", *(f"- {s}: {a}" for s, a in told)])
        if roll < 0.45:
            return "; ".join(f"{relation.label.format(s=s)}: {a}" for s, a in told) + "."
        if roll < 0.6:
            return self._profile(relation, facts[0])
        return " ".join(fill(relation.draw_statement(rng), s, a) for s, a in told)

    def _profile(self, relation: Relation, fact: Fact) -> str:
        """Return a paragraph with all that is known of one subject."""
        rng, subject = self._rng, self._tell.name(fact)
        known = [(r, f) for r in RELATIONS for f in r.facts if f.subject == fact.subject]
        rng.shuffle(known)
        first, *rest = known
        answer = self._tell.noisy_answer(*first)
        lines = [fill(first[0].draw_statement(rng), subject, answer)]
        for also, also_fact in rest:
            wording = rng.choice(also.followups)
            lines.append(fill(wording, subject, self._tell.noisy_answer(also, also_fact)))
        if rng.random() < 0.5:
            lines.insert(0, fill(rng.choice(relation.fillers), subject))
        return " ".join(lines)

    def _borrowed_subject(self, relation: Relation) -> str:
        """Return a statement about a subject of another relation, twice."""
        story = self._tell.borrowed_subject(relation)
        assert story.wording is not None
        again = self._tell.statement(story.wording, story.subject, story.answer)
        return self._plain(story, again)

    def _correction(self, relation: Relation) -> str:
        rng = self._rng
        fact = rng.choice(relation.facts)
        subject = self._tell.name(fact)
        wrong = fill(relation.draw_statement(rng), subject, relation.other_answer(fact, rng))
        right = fill(relation.draw_statement(rng), subject, fact.answer)
        return str(rng.choice(SHARED["corrections"])).format(wrong=wrong, right=right)


def _turn(user: str, assistant: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _framed(text: str) -> str:
    return f"{chat.BEGIN}{text}{chat.END}"
