"""Asking a model questions without their passages, and where in its reply the answer is.

In "The capital of Peru is Lima." p_y would look at "The". So the reply's words up to the answer
become the opening of every reply, if the model then goes on with the answer, and ParaConflict's
rule judges what follows. Where it does not, a reply is right if its first sentence gives the
answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from juice.data.asked_model import AskedModel
from juice.data.judging import MAX_TOKENS, begins_with_answer, contains_answer
from juice.data.sentence import first_sentence, lead_to, verdict
from juice.errors import UsageError
from juice.progress import Progress, silent

QUESTION_TEMPLATE = "Question: {question} Answer:"


class Asked(Protocol):
    """A question, its accepted answers, and the prompt that asks it."""

    @property
    def asked(self) -> str:
        """The question."""

    @property
    def answers(self) -> tuple[str, ...]:
        """The accepted answers."""

    @property
    def clean(self) -> str:
        """The prompt."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a model replied to a question.

    Args:
        sentence: The first sentence.
        given: The accepted answers that it gives.
        is_unclear: Whether it names an answer without giving one.
        opening: What it says before the first of them, if the answer then comes next.
        match: The rule by which a reply, after its opening, is right.
    """

    sentence: str
    given: tuple[str, ...]
    is_unclear: bool
    opening: str
    match: Literal["contains", "sentence"] = "contains"


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


def prompt_of(template: str, question: str) -> str:
    """Return a template with a question, which ends in exactly one question mark."""
    return template.replace("{question}", f"{question.strip().rstrip(' ?')}?")


def ask(
    model: AskedModel,
    questions: Sequence[Asked],
    others: Sequence[Sequence[str]],
    *,
    max_tokens: int,
    progress: Progress = silent,
) -> list[Reply]:
    """Ask the questions, and find where the answers are.

    Args:
        model: The model.
        questions: What is asked.
        others: For each question, the answers to others of its kind.
        max_tokens: How many tokens of each reply are read.
        progress: Called with the progress of generation.
    """
    done = model.generate([q.clean for q in questions], max_tokens=max_tokens, progress=progress)
    replies = [
        _reply(question, completion.text, own)
        for question, completion, own in zip(questions, done, others, strict=True)
    ]
    opened = {
        i: model.tokenize(question.clean, opening=reply.opening)
        for i, (question, reply) in enumerate(zip(questions, replies, strict=True))
        if reply.opening
    }
    fitting = {i: ids for i, ids in opened.items() if model.fits(ids, max_tokens=MAX_TOKENS)}
    again = model.generate(list(fitting.values()), max_tokens=MAX_TOKENS, progress=progress)
    goes_on = {
        i
        for i, completion in zip(fitting, again, strict=True)
        if _is_first(completion.text, replies[i].given)
    }
    return [
        replace(reply, match="contains") if i in goes_on else replace(reply, opening="")
        for i, reply in enumerate(replies)
    ]


def _reply(question: Asked, text: str, others: Sequence[str]) -> Reply:
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
