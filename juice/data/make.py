"""Conflict examples from questions with passages that contradict what the model knows.

The model is asked every question without its passage; those to which the first sentence of its
reply gives the answer are kept (juice.data.passages). In their passages the answer is swapped for
another row's answer of the same kind, which becomes the context answer:

    clean         Question: ...? Answer:
    substitution  the sentences of the swapped passage that hold the answer, then the clean prompt
    coherent      the whole swapped passage, then the clean prompt; left out where that would equal
                  the substitution prompt

In "The capital of Peru is Lima." p_y would look at "The". So a reply's words up to its answer
become the opening of every reply, if the model then goes on with the answer, and ParaConflict's
rule judges what follows; else a reply is right if its first sentence gives the answer. The answer
that the model gave comes first. The kind is that of the column `kind` or `relation`, else of the
answer's form. Entity swaps of this sort are from Longpre et al., 2021.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from textwrap import shorten
from typing import Literal, Protocol, TypeVar

from juice.data import passages
from juice.data.example import MAX_SUBJECT, QUESTION_TEMPLATE, ConflictExample, question_prompt
from juice.data.judging import MAX_TOKENS, begins_with_answer, contains_answer, kind_of, normalise
from juice.data.passages import MAX_SENTENCE_TOKENS, first_sentence, lead_to, verdict
from juice.data.readers.rows import Row, columns_of, text_of, texts_of
from juice.errors import ExampleError, UsageError
from juice.formula import ConflictType
from juice.progress import Progress, silent

Given = TypeVar("Given")
Made = TypeVar("Made")
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
SHOWN = 200  # characters of a text in a message
N_TRIES = 50


class ScoredToken(Protocol):
    """A token of an answer."""

    @property
    def logprob(self) -> float | None:
        """Its natural log-probability."""


class Answers(Protocol):
    """The answer to a prompt."""

    @property
    def text(self) -> str:
        """The continuation."""

    @property
    def tokens(self) -> Sequence[ScoredToken]:
        """The new tokens."""


class AskedModel(Protocol):
    """A model that answers, tokenises and scores, in a chat or not."""

    @property
    def chat_template_sha256(self) -> str | None:
        """The hash of the chat template that prompts go through; None for plain prompts."""

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_tokens: int,
        progress: Progress = silent,
    ) -> Sequence[Answers]:
        """Continue every prompt, a text or its tokens, greedily."""

    def tokenize(self, prompt: str, *, opening: str = "") -> tuple[int, ...]:
        """Return the tokens of a prompt and of the opening of its reply."""

    def fits(self, prompt: str | Sequence[int], *, max_tokens: int) -> bool:
        """Return whether a prompt leaves room for `max_tokens` new tokens."""

    def first_token(self, prompt: str, answer: str, *, opening: str = "") -> int | None:
        """Return an answer's first token after a prompt and an opening; None without its own."""

    def answer_logprobs(
        self, pairs: Sequence[tuple[str, str]], *, progress: Progress = silent
    ) -> Sequence[tuple[float, ...] | None]:
        """Score the tokens of each answer after its prompt; None for a pair that is too long."""


class DroppedError(Exception):
    """A row gives no example: the reason, and what shows it."""

    def __init__(self, reason: str, example: str) -> None:
        self.reason, self.example = reason, example


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, its passage and its accepted answers, of which the first is scored."""

    asked: str
    context: str
    answers: tuple[str, ...]
    kind: str
    subject: str
    relation: str
    popularity: float | None
    clean: str  # the prompt without the passage
    where: str  # the row

    def dropped(self, reason: str, example: str) -> DroppedError:
        return DroppedError(reason, f"{self.where}: {example}")


@dataclass(frozen=True)
class Conflicts:
    """The examples made, how many rows were dropped for each reason, and the first row of each."""

    examples: list[ConflictExample]
    dropped: dict[str, int]
    first_dropped: dict[str, str]

    @property
    def n_without_coherent(self) -> int:
        """The number of examples whose passage holds only the sentences of the answer."""
        return sum("coherent" not in e.prompts for e in self.examples)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The reply of a model to a question: its first sentence, and the answers that this gives.

    `is_unclear` is True if it names an answer without giving one. The `opening` are its words
    before the first answer, and `match` is the rule by which a reply, after its opening, is right.
    """

    sentence: str
    given: tuple[str, ...]
    is_unclear: bool
    opening: str
    match: Literal["contains", "sentence"]


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
    """Make conflict examples from the questions, with passages, that the model can answer.

    `columns` has the columns of fields whose names differ, by field. `max_tokens` of a reply are
    read for its first sentence, and the seed draws the answers that are swapped in.

    Raises UsageError for an unknown field or a template without `{question}`, and ExampleError for
    missing columns or when no example can be made.
    """
    check_template(question_template)
    column = columns_of(rows, FIELDS, REQUIRED, columns or {})
    drops: list[DroppedError] = []
    questions = _kept(drops, rows, lambda row: _question(row, column, question_template))
    pools: dict[str, dict[str, None]] = {}  # each kind's answers, once and in order
    for question in questions:
        pools.setdefault(question.kind, {})[question.answers[0]] = None
    asked = _kept(drops, questions, lambda question: _askable(model, question, max_tokens))
    rivals = [list(pools[question.kind]) for question in asked]
    replies = ask(model, asked, rivals, max_tokens=max_tokens, progress=progress)
    answered = zip(asked, replies, rivals, strict=True)
    examples = _kept(drops, answered, lambda one: _conflict(model, *one, seed))
    dropped = {reason: sum(one.reason == reason for one in drops) for reason in REASONS}
    first = {one.reason: one.example for one in reversed(drops)}
    if not examples:
        shown = (
            f"{n} {REASONS[reason]}, first {first[reason]} ({REMEDIES[reason]})"
            for reason, n in dropped.items()
            if n
        )
        raise ExampleError(f"no conflict example can be made: {'; '.join(shown)}")
    return Conflicts(examples, dropped, first)


def _kept(
    drops: list[DroppedError], given: Iterable[Given], make: Callable[[Given], Made]
) -> list[Made]:
    """Return what is made of each, and append those that are dropped to `drops`."""
    kept: list[Made] = []
    for one in given:
        try:
            kept.append(make(one))
        except DroppedError as drop:
            drops.append(drop)
    return kept


def _question(row: Row, column: Mapping[str, str], template: str) -> Question:
    values = {field: row.values.get(name) for field, name in column.items()}
    text = {field: text_of(values.get(field)) for field in FIELDS}
    asked, context, relation = text["question"], text["context"], text["relation"]
    answers = tuple(
        " ".join(answer.split()) for answer in texts_of(values.get("answer")) if normalise(answer)
    )
    if asked is None or context is None or not answers:
        lacking = "question" if asked is None else "context" if context is None else "answer"
        raise DroppedError("malformed", f"{row.where} has no {lacking}")
    kind = text["kind"] or relation or kind_of(answers[0])
    try:
        popularity = float(text["popularity"] or "")
    except ValueError:
        popularity = math.nan
    return Question(
        asked=asked,
        context=" ".join(context.split()),
        answers=answers,
        kind=kind,
        subject=text["subject"] or f"{asked.rstrip(' ?')[:MAX_SUBJECT]}?",
        relation=relation or kind,
        popularity=popularity if math.isfinite(popularity) else None,
        clean=question_prompt(asked, template),
        where=row.where,
    )


def _askable(model: AskedModel, question: Question, max_tokens: int) -> Question:
    if not passages.find(question.context, question.answers):
        shown = shorten(question.context, SHOWN)
        raise question.dropped("answer_not_in_context", f"{question.answers[0]!r} in {shown!r}")
    if not model.fits(question.clean, max_tokens=max_tokens):
        raise question.dropped("too_long", shorten(question.asked, SHOWN))
    return question


def _conflict(
    model: AskedModel, question: Question, reply: Reply, pool: Sequence[str], seed: int
) -> ConflictExample:
    if not reply.given:
        raise question.dropped(
            "unclear" if reply.is_unclear else "not_known",
            f"{question.clean!r} was answered {shorten(reply.sentence, SHOWN)!r}, expected "
            f"{question.answers[0]!r}",
        )
    question = replace(question, answers=tuple(dict.fromkeys([*reply.given, *question.answers])))
    new = _swapped_in(model, question, reply.opening, pool, seed)
    spans = passages.find(question.context, question.answers)
    context, spans = passages.replace(question.context, spans, new)
    sentences = passages.sentences_with(context, spans)
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
        raise question.dropped("too_long", shorten(question.asked, SHOWN))
    return made


def _swapped_in(
    model: AskedModel, question: Question, opening: str, pool: Sequence[str], seed: int
) -> str:
    """Return another answer from the pool, which begins with another token than the first."""
    # Each question has its own seed, so its swap does not depend on which others the model knows.
    drawn = Random(f"{seed} {question.asked}").sample(pool, min(N_TRIES, len(pool)))
    accepted = [normalise(answer) for answer in question.answers]
    others = [
        other
        for other in drawn
        if not any(normalise(other) in answer or answer in normalise(other) for answer in accepted)
    ]
    right = question.answers[0]
    if not others:
        alone = f"{right!r} is alone of the kind {question.kind!r}"
        raise question.dropped("no_other_answer", alone)
    first_token = partial(model.first_token, question.clean, opening=opening)
    token = first_token(right)
    for other in others:
        if first_token(other) not in (None, token):
            return other
    raise question.dropped("same_first_token", f"{right!r} and {others[0]!r}")


def check_template(template: str) -> None:
    """Raise UsageError for a question template without {question}, or with another field."""
    remedy = "such as 'Question: {question}\\nAnswer:'"
    fields = re.findall(r"\{(\w*)\}", template)
    if fields.count("question") != 1:
        raise UsageError(
            f"the question template is {template!r}; expected a text with {{question}} once, "
            f"{remedy}"
        )
    if others := sorted(set(fields) - {"question"}):
        raise UsageError(
            f"the question template has {{{others[0]}}}; expected {{question}} alone, {remedy}: "
            "passages are put before it"
        )


def ask(
    model: AskedModel,
    questions: Sequence[Question],
    others: Sequence[Sequence[str]],
    *,
    max_tokens: int,
    progress: Progress = silent,
) -> list[Reply]:
    """Ask the questions, and find where in `max_tokens` of each reply the answers are.

    `others` has, for each question, the answers to others of its kind.
    """
    done = model.generate([q.clean for q in questions], max_tokens=max_tokens, progress=progress)
    replies = [
        _reply(question, completion.text, rivals)
        for question, completion, rivals in zip(questions, done, others, strict=True)
    ]
    opened = {
        i: ids
        for i, (question, reply) in enumerate(zip(questions, replies, strict=True))
        if (opening := reply.opening)
        and model.fits(
            ids := model.tokenize(question.clean, opening=opening), max_tokens=MAX_TOKENS
        )
    }
    again = model.generate(list(opened.values()), max_tokens=MAX_TOKENS, progress=progress)
    second = zip(opened, again, strict=True)
    goes_on = {i for i, completion in second if _is_first(completion.text, replies[i].given)}
    return [
        replace(reply, match="contains") if i in goes_on else replace(reply, opening="")
        for i, reply in enumerate(replies)
    ]


def _reply(question: Question, text: str, others: Sequence[str]) -> Reply:
    sentence, given = first_sentence(text), dict[str, str | None]()
    found = verdict(sentence, question.answers, others=others, question=question.asked)
    for answer in question.answers if found == "given" else ():
        if verdict(sentence, [answer], question=question.asked) == "given":
            given[answer] = lead_to(sentence, answer, question=question.asked)
    ordered = sorted(given, key=lambda a: (given[a] is None, len(given[a] or "")))
    return Reply(
        sentence=sentence,
        given=tuple(ordered),
        is_unclear=found == "unclear",
        opening=(given[ordered[0]] if ordered else None) or "",
        match="contains" if _is_first(text, ordered) else "sentence",
    )


def _is_first(text: str, given: Sequence[str]) -> bool:
    """Return whether a reply begins with the first of the answers that it gives."""
    return begins_with_answer(text, given[:1]) and contains_answer(text, given[:1])
