"""Conflict examples from what a model remembers: no answers are given, the model is asked.

The subjects of each relation (`facts/`) are asked about in three wordings. An answer that the model
gives with confidence in all of them is its memory, right or wrong, and another subject's answer of
the same relation is what a false context says:

    clean         The capital of Peru is
    substitution  The capital of Peru is Oslo. The capital of Peru is
    coherent      such a statement, sentences that back it, and: Question: What is the capital of
                  Peru? Answer: The capital of Peru is

In a chat the user states the context and asks, and the statement up to its answer is the opening
of the reply.

A file of prompts of one's own, without answers, works alike: each row has a `prompt`, a question or
a statement up to its answer, and perhaps its `relation`, whose other answers contradict it, and a
`context`, a passage that gives the answer, in which that is swapped.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import NamedTuple

from juice.data.example import ConflictExample
from juice.data.judging import normalise
from juice.data.make import Answers, AskedModel
from juice.data.passages import followed, joins_the_next, swapped
from juice.data.readers.rows import Row, text_of
from juice.errors import ExampleError
from juice.progress import Progress, silent

FACTS = Path(__file__).parent / "facts"
N_REMEMBERED = 120
N_WORDINGS = 3
N_ASKED_AT_ONCE = 256
MAX_TOKENS = 6
N_ANSWER_WORDS = 3
N_OPEN_SUBJECTS, N_HELD_OUT = 16, 8  # of a relation
LEAST_CONFIDENCE = 0.1  # probability of the answer's first token, in each wording
MOST_ALIKE = 5  # facts of a relation with one answer
N_SUPPORTS = (1, 2, 3, 4, 5)
# What is said about prompts of one's own.
ANSWERS = ("The answer to the question ", "The right answer to the question ")
# Of any answer, beside what backs those of its relation.
SUPPORTS = (
    "Several encyclopedias name {a}.",
    "Those who have looked into it agree on {a}.",
    "A recent report came to the same result, {a}.",
    "This is confirmed by official records, which have listed {a} for many years.",
    "Numerous sources, including textbooks and historical archives, point to {a}.",
    "Additionally, {a} is widely known for it, and is mentioned in most articles on the subject.",
    "For this reason, {a} plays an important role in everything that is written about it.",
    "No serious source disputes that it is {a}.",
    "Visitors, journalists and scholars alike have reported the same about {a}.",
    "Over the years, {a} has become closely associated with it.",
)
# What follows an answer, and the words with which no name begins.
AFTER = re.compile(
    r"[.,;:!?\n\"()\[\]{}|*。，、；：！？（）「」]"
    r"| (?:and|or|in|is|was|who|which|that|with|of the) "
)
N_LETTERS = 2  # the most of an answer that must be what is said first
NO_NAMES = {
    *("a", "all", "also", "an", "any", "based", "called", "from", "in", "it", "its", "known"),
    *("located", "made", "named", "no", "none", "not", "of", "one", "our", "part", "same", "so"),
    *("some", "the", "their", "this", "to", "used", "very", "well", "what", "which"),
}


@dataclass(frozen=True, kw_only=True)
class Relation:
    """Wordings about a subject `{s}` and its answer `{a}`, and subjects; see `facts/`.

    The `passage` gives the answer of a relation with one subject.
    """

    name: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    supports: tuple[str, ...]
    subjects: tuple[str, ...]
    beginnings: tuple[str, ...] = ()
    passage: str = ""

    def opening(self, subject: str, i: int) -> str:
        """Return the statement at an index up to its answer."""
        return _capitalised(self.statements[i].removesuffix(" {a}.").replace("{s}", subject))

    def statement(self, subject: str, answer: str, i: int) -> str:
        """Return the statement at an index that gives an answer."""
        return f"{followed(self.opening(subject, i), answer)}."

    def question(self, subject: str, i: int) -> str:
        """Return the question at an index."""
        return _capitalised(self.questions[i].replace("{s}", subject))


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """A subject and the answer that a model gives in all wordings, with its least confidence."""

    relation: Relation
    subject: str
    answer: str
    confidence: float


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


@cache
def relations() -> tuple[Relation, ...]:
    """Return the relations that come with JuICE."""
    wordings = tomllib.loads((FACTS / "wordings.toml").read_text(encoding="utf-8"))
    return tuple(
        Relation(
            name=name,
            subjects=_subjects(name),
            statements=tuple(of_relation["statements"]),
            questions=tuple(of_relation["questions"]),
            supports=tuple(of_relation["supports"]),
            beginnings=tuple(of_relation["beginnings"]),
        )
        for name, of_relation in wordings.items()
    )


def _subjects(relation: str) -> tuple[str, ...]:
    lines = (FACTS / f"{relation}.tsv").read_text(encoding="utf-8").splitlines()
    names = (line.split("\t")[0].split("|")[0] for line in lines if line)
    return tuple(dict.fromkeys(names))


class OpenPrompt(NamedTuple):
    """A prompt about a subject of a relation that leaves open what is said, and its opening."""

    relation: str
    subject: str
    prompt: str
    opening: str


def open_prompts(*, is_chat: bool, seed: int = 0, held_out: bool = False) -> list[OpenPrompt]:
    """Return questions and beginnings of sentences about sixteen subjects of each relation.

    Args:
        is_chat: Whether a user asks, and a beginning is that of the reply.
        seed: Seed of the subjects, and of how each is spoken about.
        held_out: Take eight others of the subjects instead, to measure on.
    """
    rng, others, prompts = Random(seed), Random(f"held out {seed}"), list[OpenPrompt]()
    for relation in relations():
        subjects = rng.sample(relation.subjects, min(N_OPEN_SUBJECTS, len(relation.subjects)))
        drawn = list(_left_open(relation, subjects, rng, is_chat=is_chat))
        if held_out:
            rest = sorted({*relation.subjects} - {*subjects})
            some = others.sample(rest, min(N_HELD_OUT, len(rest)))
            drawn = list(_left_open(relation, some, others, is_chat=is_chat))
        prompts += drawn
    return prompts


def _left_open(
    relation: Relation, subjects: Sequence[str], rng: Random, *, is_chat: bool
) -> Iterator[OpenPrompt]:
    for subject in subjects:
        question = relation.question(subject, rng.randrange(len(relation.questions)))
        i = rng.randrange(len(relation.beginnings) + 1)
        begun = relation.beginnings[i - 1].replace("{s}", subject) if i else ""
        begun = _capitalised(begun)
        if is_chat:
            yield OpenPrompt(relation.name, subject, question, begun)
        else:
            prompt = begun or f"Question: {question} Answer:"
            yield OpenPrompt(relation.name, subject, prompt, "")


def remembered_examples(
    model: AskedModel,
    *,
    n: int = N_REMEMBERED,
    seed: int = 0,
    relation: str | None = None,
    progress: Progress = silent,
) -> list[ConflictExample]:
    """Ask a model about subjects, in a seeded order that takes the relations in turn.

    Args:
        model: The model; in a chat or not, and so are the examples.
        n: The number of facts at which asking ends.
        seed: Seed of the order, and of what false contexts say.
        relation: Ask about this relation only.
        progress: Reports how many of the wanted facts are there.

    Returns:
        At most n examples, fewer where the model remembers less.

    Raises:
        ExampleError: There is no such relation, or the model remembers nothing, or nothing that
            another answer of its relation contradicts.
    """
    known = {one.name: one for one in relations()}
    if relation is not None and relation not in known:
        raise ExampleError(f"no relation is called {relation!r}; expected {', '.join(known)}")
    chosen = list(known.values()) if relation is None else [known[relation]]
    return _examples(model, chosen, n, seed, progress)


def examples_of_prompts(
    model: AskedModel,
    rows: Sequence[Row],
    *,
    n: int = N_REMEMBERED,
    seed: int = 0,
    progress: Progress = silent,
) -> list[ConflictExample]:
    """Ask a model about prompts of one's own, without answers; see `remembered_examples`.

    Raises ExampleError for a row without a prompt, and where the model remembers nothing, or
    nothing that another answer of its relation contradicts.
    """
    return _examples(model, [_relation_of(row) for row in rows], n, seed, progress)


def _relation_of(row: Row) -> Relation:
    """Return the wordings of a row's prompt, as a relation with one subject."""
    prompt = text_of(row.values.get("prompt"))
    if prompt is None:
        raise ExampleError(f"{row.where} has no prompt; expected a question, or a statement")
    prompt = " ".join(prompt.split())
    is_question = prompt.endswith(("?", "？"))
    asked = prompt if is_question else f"Complete the sentence: {prompt}"
    leads = ANSWERS if is_question else ("", "As is well known: ")
    begun = [
        f'{lead}"{prompt}" is {{a}}.' if is_question else f"{lead}{prompt} {{a}}." for lead in leads
    ]
    return Relation(
        name=text_of(row.values.get("relation")) or "",
        statements=(*begun, begun[0]),
        questions=(asked,) * N_WORDINGS,
        supports=(),
        subjects=(text_of(row.values.get("subject")) or prompt,),
        passage=text_of(row.values.get("context")) or "",
    )


def _examples(
    model: AskedModel, among: Sequence[Relation], n: int, seed: int, progress: Progress
) -> list[ConflictExample]:
    facts = _remembered(model, among, n, Random(seed), progress)
    examples = [e for e in (_example(model, fact, facts, seed) for fact in facts) if e is not None]
    if not examples and facts:
        raise ExampleError(
            f"the model remembers {len(facts)} facts, but none has another answer of its relation "
            "to contradict it; give more prompts of each relation, or the same relation to all "
            "whose answers are of one kind"
        )
    if not examples:
        n_subjects = sum(len(one.subjects) for one in among)
        raise ExampleError(
            f"the model answers alike in three wordings about none of {n_subjects} subjects; "
            "give examples of facts that it knows with --examples"
        )
    return examples


def _remembered(
    model: AskedModel, among: Sequence[Relation], n: int, rng: Random, progress: Progress
) -> list[Remembered]:
    """Ask until n facts are there, or nothing is left to ask."""
    shuffled = ([(one, s) for s in rng.sample(one.subjects, len(one.subjects))] for one in among)
    order = [asked for turn in zip_longest(*shuffled) for asked in turn if asked is not None]
    found: list[Remembered] = []
    alike: Counter[tuple[str, str]] = Counter()
    with progress("asking what the model remembers", n) as advance:
        while order and len(found) < n:
            some, order = order[:N_ASKED_AT_ONCE], order[N_ASKED_AT_ONCE:]
            before = len(found)
            for fact in _answered_alike(model, some):
                key = (fact.relation.name, normalise(fact.answer))
                if alike[key] < MOST_ALIKE and len(found) < n:
                    alike[key] += 1
                    found.append(fact)
            advance(len(found) - before)
    return found


def _answered_alike(
    model: AskedModel, asked: Sequence[tuple[Relation, str]]
) -> Iterator[Remembered]:
    """Yield those that the model answers alike, with confidence, in all wordings.

    Most show by their first tokens that they are not among these, which costs no decoding.
    """
    begun = [(one, subject, "", 1.0) for one, subject in asked]
    for wording in range(N_WORDINGS):
        replies = _replies(model, [(one, s) for one, s, *_ in begun], wording, 1)
        begun = [
            (one, subject, begins or before, min(confidence, sure))
            for (one, subject, before, confidence), (begins, sure) in zip(
                begun, map(_beginning, replies), strict=True
            )
            if sure >= LEAST_CONFIDENCE
            if begins.startswith(before) or before.startswith(begins)
        ]
    left = [(one, subject, "", confidence) for one, subject, _, confidence in begun]
    for wording in range(N_WORDINGS):
        replies = _replies(model, [(one, s) for one, s, *_ in left], wording, MAX_TOKENS)
        answers = map(_answer_in, replies)
        left = [
            (one, subject, answer, confidence)
            for (one, subject, before, confidence), answer in zip(left, answers, strict=True)
            if answer and (not before or normalise(answer) == normalise(before))
            if not {*normalise(answer).split()} & {*normalise(subject).split()}
        ]
    for one, subject, answer, confidence in left:
        yield Remembered(relation=one, subject=subject, answer=answer, confidence=confidence)


def _beginning(reply: Answers) -> tuple[str, float]:
    """Return a reply of one token, normalised, and the token's probability; 0 without one."""
    sure = reply.tokens[0].logprob if reply.tokens else None
    return normalise(reply.text), 0.0 if sure is None else math.exp(sure)


def _replies(
    model: AskedModel, asked: Sequence[tuple[Relation, str]], wording: int, max_tokens: int
) -> Sequence[Answers]:
    """Return the replies about some subjects in a wording."""
    prompts = [_worded(model, one, subject, wording) for one, subject in asked]
    ids = [model.tokenize(prompt, opening=opening) for prompt, opening in prompts]
    return model.generate(ids, max_tokens=max_tokens)


def _worded(model: AskedModel, relation: Relation, subject: str, wording: int) -> tuple[str, str]:
    """Return the prompt that asks in a wording, and the opening of its reply."""
    lead = relation.opening(subject, wording)
    if model.chat_template_sha256 is not None:
        return relation.question(subject, wording), lead
    # The last wording is that in which a paragraph of false evidence ends.
    is_last = wording == N_WORDINGS - 1
    return (f"Question: {relation.question(subject, 0)} Answer: {lead}" if is_last else lead), ""


def _answer_in(reply: Answers) -> str:
    """Return the name or word with which a reply begins; nothing where it does not or is cut."""
    begins, *rest = AFTER.split(reply.text.lstrip(), maxsplit=1)
    words, is_cut = begins.split(), not rest and len(reply.tokens) >= MAX_TOKENS
    if is_cut or not words or len(words) > N_ANSWER_WORDS or words[0].lower() in NO_NAMES:
        return ""
    answer = " ".join(words)
    return answer if normalise(answer) else ""


def _is_within_words(answer: str) -> bool:
    """Return whether words hold a normalised answer that has nothing to do with them."""
    return len(answer) <= N_LETTERS and not joins_the_next(answer)


def _example(
    model: AskedModel, fact: Remembered, facts: Sequence[Remembered], seed: int
) -> ConflictExample | None:
    """Return the example of a fact; None where no other answer of its relation can be told."""
    relation, subject = fact.relation, fact.subject
    rng = Random(f"{seed} {relation.name} {subject}")
    i = rng.randrange(N_WORDINGS - 1)
    clean, opening = _worded(model, relation, subject, i)
    others = sorted({one.answer for one in facts if one.relation.name == relation.name})
    first, own = model.first_token(clean, fact.answer, opening=opening), normalise(fact.answer)
    # Of two of which one holds the other, as of football and American football, both are right.
    rest = [
        o
        for o in rng.sample(others, len(others))
        if normalise(o) not in own and own not in normalise(o)
    ]
    # Where none begins otherwise, as with years, the two are told apart by later tokens.
    apart = (o for o in rest if model.first_token(clean, o, opening=opening) not in (first, None))
    told = next(apart, next(iter(rest), None))
    if told is None:
        return None
    j = i if rng.random() < 0.5 else rng.randrange(len(relation.statements))
    supports = rng.sample((*relation.supports, *SUPPORTS), rng.choice(N_SUPPORTS))
    backed = (_capitalised(s.replace("{s}", subject).replace("{a}", told)) for s in supports)
    swap = {fact.answer: told}
    passage = swapped(relation.passage, swap)
    if passage == relation.passage:
        passage = " ".join([relation.statement(subject, told, j), *backed])
    is_chat = model.chat_template_sha256 is not None
    asked = clean if is_chat else _worded(model, relation, subject, N_WORDINGS - 1)[0]
    return ConflictExample(
        subject=subject,
        relation=relation.name or None,
        parametric_answer=(fact.answer,),
        context_answer=(told,),
        prompts={
            "clean": clean,
            "substitution": f"{relation.statement(subject, told, j)} {clean}",
            "coherent": f"{passage} {asked}",
        },
        # One or two letters, such as the symbol of hydrogen, are in many words.
        match="begins" if any(map(_is_within_words, (own, normalise(told)))) else "contains",
        opening=opening,
        chat_template_sha256=model.chat_template_sha256,
    )
