"""Conflict examples from questions with passages that contradict what the model knows.

The model is asked every question without its passage; those that it answers correctly, by the
paper's rule, are kept. In their passages the answer is swapped for another row's answer of the same
kind, which becomes the context answer:

    clean         Question: ...? Answer:
    substitution  the sentences of the swapped passage that hold the answer, then the clean prompt
    coherent      the whole swapped passage, then the clean prompt; left out where that would equal
                  the substitution prompt

The answer that the model gave comes first among the parametric ones. The kind is taken from the
column `kind` or `relation`, else from the answer's form. Entity swaps of this sort are from
Longpre et al., 2021.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from juice.data import passage
from juice.data.answer_kinds import kind_of
from juice.data.asked_model import AskedModel
from juice.data.example import ConflictExample, question_prompt
from juice.data.fields import columns_of, text_of, texts_of
from juice.data.judging import MAX_TOKENS, N_WORDS, contains_answer, normalise
from juice.data.readers.rows import Row
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
    "no_other_answer": "have no other answer of their kind to swap in",
    "same_first_token": "have only answers to swap in that begin with the same token",
    "too_long": "are too long for the model",
}
REQUIRED = ("question", "context", "answer")
MAX_SUBJECT = 80
N_TRIES = 50


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

    @property
    def clean(self) -> str:
        """The prompt without the passage."""
        return question_prompt(self.asked)


@dataclass(frozen=True)
class Conflicts:
    """The examples made, and how many rows were dropped for each reason."""

    examples: list[ConflictExample]
    dropped: dict[str, int]

    @property
    def n_without_coherent(self) -> int:
        """The number of examples whose passage holds only the sentences of the answer."""
        return sum("coherent" not in e.prompts for e in self.examples)


def make_conflicts(
    model: AskedModel,
    rows: Sequence[Row],
    *,
    columns: Mapping[str, str] | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Conflicts:
    """Make conflict examples from the questions that the model can answer.

    Args:
        model: The model that is asked.
        rows: Questions with passages and answers.
        columns: The columns of fields whose names differ, by field.
        seed: Draws the answers that are swapped in.
        progress: Called with the progress of generation.

    Raises UsageError for an unknown field, and ExampleError for missing columns or when no example
    can be made.
    """
    column = columns_of(rows, FIELDS, REQUIRED, columns or {})
    read = [
        _question({field: row.values.get(name) for field, name in column.items()}) for row in rows
    ]
    questions = [question for question in read if question is not None]
    pools: dict[str, dict[str, None]] = {}  # each kind's answers, once and in order
    for question in questions:
        pools.setdefault(question.kind, {})[question.answers[0]] = None
    obstacles = [_obstacle(model, question) for question in questions]
    dropped = Counter(
        ["malformed"] * read.count(None) + [obstacle for obstacle in obstacles if obstacle]
    )
    candidates = [
        question for question, obstacle in zip(questions, obstacles, strict=True) if not obstacle
    ]
    examples, unknown = [], ""
    answers = model.generate(
        [q.clean for q in candidates], max_tokens=MAX_TOKENS, progress=progress
    )
    for question, completion in zip(candidates, answers, strict=True):
        made = _conflict(model, question, completion.text, list(pools[question.kind]), seed)
        if isinstance(made, str):
            dropped[made] += 1
            if made == "not_known":
                unknown = unknown or (
                    f"; {question.clean!r} was answered {completion.text.strip()!r}, "
                    f"not {question.answers[0]!r} within {N_WORDS} words"
                )
        else:
            examples.append(made)
    counts = {reason: dropped[reason] for reason in REASONS}
    if not examples:
        reasons = "; ".join(f"{n} {REASONS[reason]}" for reason, n in counts.items() if n)
        raise ExampleError(
            f"no conflict example can be made: {reasons}{unknown}; "
            "give more rows, or questions that the model can answer"
        )
    return Conflicts(examples, counts)


def _question(values: Mapping[str, object]) -> Question | None:
    asked, context, answers = (
        text_of(values.get("question")),
        text_of(values.get("context")),
        texts_of(values.get("answer")),
    )
    answers = tuple(" ".join(answer.split()) for answer in answers if normalise(answer))
    if asked is None or context is None or not answers:
        return None
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
        subject=text_of(values.get("subject")) or asked[:MAX_SUBJECT],
        relation=text_of(values.get("relation")) or kind,
        popularity=popularity,
    )


def _obstacle(model: AskedModel, question: Question) -> str | None:
    """Return the reason to drop a question before the model is asked, if there is one."""
    if not passage.find(question.context, question.answers):
        return "answer_not_in_context"
    return None if model.fits(question.clean, max_tokens=MAX_TOKENS) else "too_long"


def _conflict(
    model: AskedModel, question: Question, output: str, pool: Sequence[str], seed: int
) -> ConflictExample | str:
    """Make an example of a question that the model answered, or return why it is dropped."""
    given = [answer for answer in question.answers if contains_answer(output, [answer])]
    if not given:
        return "not_known"
    question = replace(question, answers=tuple(dict.fromkeys([*given, *question.answers])))
    # Each question has its own seed, so its swap does not depend on which others the model knows.
    drawn = Random(f"{seed} {question.asked}").sample(pool, min(N_TRIES, len(pool)))
    own = [normalise(answer) for answer in question.answers]
    others = [
        other
        for other in drawn
        if not any(normalise(other) in answer or answer in normalise(other) for answer in own)
    ]
    if not others:
        return "no_other_answer"
    token = model.first_token(question.clean, question.answers[0])
    new = next(
        (
            other
            for other in others
            if model.first_token(question.clean, other) not in (None, token)
        ),
        None,
    )
    if new is None:
        return "same_first_token"
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
    if not all(model.fits(prompt, max_tokens=MAX_TOKENS) for prompt in prompts.values()):
        return "too_long"
    return ConflictExample(
        subject=question.subject,
        parametric_answer=question.answers,
        context_answer=(new,),
        prompts=prompts,
        context=context,
        question=question.clean,
        relation=question.relation,
        popularity=question.popularity,
    )
