"""Conflict examples from questions with passages that contradict what the model knows.

The model is asked every question without its passage; those to which the first sentence of its
reply gives the answer are kept (juice.data.sentence). In their passages the answer is swapped for
another row's answer of the same kind, which becomes the context answer:

    clean         Question: ...? Answer:
    substitution  the sentences of the swapped passage that hold the answer, then the clean prompt
    coherent      the whole swapped passage, then the clean prompt; left out where that would equal
                  the substitution prompt

Where a reply has words before its answer, they open every reply (juice.data.asking). The answer
that the model gave comes first among the parametric ones. The kind is taken from the
column `kind` or `relation`, else from the answer's form. Entity swaps of this sort are from
Longpre et al., 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from textwrap import shorten
from typing import NamedTuple

from juice.data import passage
from juice.data.answer_kinds import kind_of
from juice.data.asked_model import AskedModel
from juice.data.asking import QUESTION_TEMPLATE, Reply, ask, check_template, prompt_of
from juice.data.example import ConflictExample
from juice.data.fields import columns_of, text_of, texts_of
from juice.data.judging import normalise
from juice.data.readers.rows import Row
from juice.data.sentence import MAX_SENTENCE_TOKENS
from juice.errors import ExampleError
from juice.methods import ConflictType
from juice.progress import Progress, silent

FIELDS = {
    "question": ("question",),
    "context": ("context",),
    "answer": ("answer", "answers"),
    "kind": ("kind",),
    "relation": ("relation",),
    "popularity": ("popularity",),
    "subject": ("subject",),
}
REASONS = {
    "malformed": "lack a question, a context or an answer",
    "answer_not_in_context": "have no answer that occurs in their context",
    "not_known": "ask what the model does not know",
    "unclear": "are answered with a denial, or with several answers",
    "no_other_answer": "have no other answer of their kind to swap in",
    "same_first_token": "have only answers to swap in that begin with the same token",
    "too_long": "are too long for the model",
}
REMEDIES = {
    "malformed": "fill in these columns, or name yours with --columns",
    "answer_not_in_context": "write the answer as its passage does, or list that form as well",
    "not_known": "list other forms of the answer; if the reply is cut off, raise --max-tokens; if "
    "the model does not understand the question, give --question-template or --chat-template",
    "unclear": "ask for one answer with --question-template, or list every right one",
    "no_other_answer": "give more rows of the kind, or another column kind",
    "same_first_token": "give more rows of the kind",
    "too_long": "shorten the passages, or lower --max-tokens",
}
REQUIRED = ("question", "context", "answer")
MAX_SUBJECT = 80
SHOWN = 200  # characters of a text in a message
N_TRIES = 50


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, its passage and its accepted answers, of which the first is scored.

    `clean` is the prompt without the passage, `where` the row.
    """

    asked: str
    context: str
    answers: tuple[str, ...]
    kind: str
    subject: str
    relation: str
    popularity: float | None
    clean: str
    where: str

    def dropped(self, reason: str, example: str) -> Dropped:
        """Return why no example is made of the question."""
        return Dropped(reason, f"{self.where}: {example}")


class Dropped(NamedTuple):
    """Why a row gives no example, and what shows it."""

    reason: str
    example: str


@dataclass(frozen=True)
class Conflicts:
    """The examples made, how many rows were dropped for each reason, and the first row of each."""

    examples: list[ConflictExample]
    dropped: dict[str, int]
    first_dropped: dict[str, str]

    @property
    def drops(self) -> list[str]:
        """What was dropped, a text for each reason: how many, the first row, and the remedy."""
        return [
            f"{n} {REASONS[reason]}, first {self.first_dropped[reason]} ({REMEDIES[reason]})"
            for reason, n in self.dropped.items()
            if n
        ]

    @property
    def n_without_coherent(self) -> int:
        """The number of examples whose passage holds only the sentences of the answer."""
        return sum("coherent" not in e.prompts for e in self.examples)


def make_conflicts(
    model: AskedModel,
    rows: Sequence[Row],
    *,
    columns: Mapping[str, str] | None = None,
    question_template: str = QUESTION_TEMPLATE,
    max_tokens: int = MAX_SENTENCE_TOKENS,
    seed: int = 0,
    progress: Progress = silent,
) -> Conflicts:
    """Make conflict examples from the questions that the model can answer.

    Args:
        model: The model that is asked, through its chat template or not.
        rows: Questions with passages and answers.
        columns: The columns of fields whose names differ, by field.
        question_template: The prompt that asks a question, with `{question}` in it.
        max_tokens: How many tokens of a reply are read for its first sentence.
        seed: Draws the answers that are swapped in.
        progress: Called with the progress of generation.

    Raises UsageError for an unknown field or a template without `{question}`, and ExampleError for
    missing columns or when no example can be made.
    """
    check_template(question_template)
    column = columns_of(rows, FIELDS, REQUIRED, columns or {})
    read = [
        _question(
            {field: row.values.get(name) for field, name in column.items()},
            question_template,
            row.where,
        )
        for row in rows
    ]
    questions = [question for question in read if isinstance(question, Question)]
    pools: dict[str, dict[str, None]] = {}  # each kind's answers, once and in order
    for question in questions:
        pools.setdefault(question.kind, {})[question.answers[0]] = None
    drops = [question for question in read if isinstance(question, Dropped)]
    candidates = []
    for question in questions:
        if obstacle := _obstacle(model, question, max_tokens):
            drops.append(obstacle)
        else:
            candidates.append(question)
    replies = ask(
        model,
        candidates,
        [list(pools[question.kind]) for question in candidates],
        max_tokens=max_tokens,
        progress=progress,
    )
    made = [
        _conflict(model, question, reply, list(pools[question.kind]), seed)
        for question, reply in zip(candidates, replies, strict=True)
    ]
    examples = [one for one in made if isinstance(one, ConflictExample)]
    drops += [one for one in made if isinstance(one, Dropped)]
    found = Conflicts(
        examples,
        {reason: sum(one.reason == reason for one in drops) for reason in REASONS},
        {one.reason: one.example for one in reversed(drops)},
    )
    if not examples:
        raise ExampleError(f"no conflict example can be made: {'; '.join(found.drops)}")
    return found


def _question(values: Mapping[str, object], template: str, where: str) -> Question | Dropped:
    asked, context, answers = (
        text_of(values.get("question")),
        text_of(values.get("context")),
        texts_of(values.get("answer")),
    )
    answers = tuple(" ".join(answer.split()) for answer in answers if normalise(answer))
    if asked is None or context is None or not answers:
        lacking = "question" if asked is None else "context" if context is None else "answer"
        return Dropped("malformed", f"{where} has no {lacking}")
    kind = text_of(values.get("kind")) or text_of(values.get("relation")) or kind_of(answers[0])
    try:
        popularity = float(text_of(values.get("popularity")) or "")
    except ValueError:
        popularity = None
    return Question(
        asked=asked,
        context=" ".join(context.split()),
        answers=answers,
        kind=kind,
        subject=text_of(values.get("subject")) or f"{asked.rstrip(' ?')[:MAX_SUBJECT]}?",
        relation=text_of(values.get("relation")) or kind,
        popularity=popularity,
        clean=prompt_of(template, asked),
        where=where,
    )


def _obstacle(model: AskedModel, question: Question, max_tokens: int) -> Dropped | None:
    """Return the reason to drop a question before the model is asked, if there is one."""
    if not passage.find(question.context, question.answers):
        shown = shorten(question.context, SHOWN)
        return question.dropped("answer_not_in_context", f"{question.answers[0]!r} in {shown!r}")
    if not model.fits(question.clean, max_tokens=max_tokens):
        return question.dropped("too_long", shorten(question.asked, SHOWN))
    return None


def _conflict(
    model: AskedModel, question: Question, reply: Reply, pool: Sequence[str], seed: int
) -> ConflictExample | Dropped:
    """Make an example of a question that the model answered, or return why it is dropped."""
    if not reply.given:
        return question.dropped(
            "unclear" if reply.is_unclear else "not_known",
            f"{question.clean!r} was answered {shorten(reply.sentence, SHOWN)!r}, expected "
            f"{question.answers[0]!r}",
        )
    question = replace(
        question,
        answers=tuple(dict.fromkeys([*reply.given, *question.answers])),
    )
    # Each question has its own seed, so its swap does not depend on which others the model knows.
    drawn = Random(f"{seed} {question.asked}").sample(pool, min(N_TRIES, len(pool)))
    own = [normalise(answer) for answer in question.answers]
    others = [
        other
        for other in drawn
        if not any(normalise(other) in answer or answer in normalise(other) for answer in own)
    ]
    if not others:
        shown = f"{question.answers[0]!r} is alone of the kind {question.kind!r}"
        return question.dropped("no_other_answer", shown)
    first_token = partial(model.first_token, question.clean, opening=reply.opening)
    token = first_token(question.answers[0])
    new = next(
        (other for other in others if first_token(other) not in (None, token)),
        None,
    )
    if new is None:
        shown = f"{question.answers[0]!r} and {others[0]!r}"
        return question.dropped("same_first_token", shown)
    context, spans = passage.replace(
        question.context, passage.find(question.context, question.answers), new
    )
    sentences = passage.sentences_with(context, spans)
    prompts: dict[ConflictType, str] = {
        "clean": question.clean,
        "substitution": f"{sentences} {question.clean}",
    }
    if sentences != context:
        prompts["coherent"] = f"{context} {question.clean}"
    made = ConflictExample(
        subject=question.subject,
        parametric_answer=question.answers,
        context_answer=(new,),
        prompts=prompts,
        context=context,
        question=question.clean,
        relation=question.relation,
        popularity=question.popularity,
        match=reply.match,
        opening=reply.opening,
        chat_template_sha256=model.chat_template_sha256,
    )
    asked = [model.tokenize(prompt, opening=reply.opening) for prompt in prompts.values()]
    if not all(model.fits(ids, max_tokens=made.max_tokens) for ids in asked):
        return question.dropped("too_long", shorten(question.asked, SHOWN))
    return made
