"""NQ-Swap (Longpre et al., 2021): Natural Questions with another answer put into the passages.

    question, org_context, org_answer, sub_context, sub_answer (answers are text or lists of texts)

The swapped answer is the context answer. HTML tags in the passages (`<P>`, `<Td>`) are dropped.
"""

from __future__ import annotations

import re
from typing import Any

from juice.data.example import ConflictExample, parse_example, question_prompt
from juice.data.judging import is_among
from juice.errors import ExampleError

HUB_ID = "pminervini/NQ-Swap"
COLUMNS = ("question", "org_context", "org_answer", "sub_context", "sub_answer")
TAG = re.compile(r"</?[A-Za-z][^<>]*>")


def read_row(row: dict[str, Any], where: str, name: str) -> ConflictExample | str:  # noqa: ARG001 -- shared signature
    """Make an example from a row, or return why it holds no conflict."""
    question, passage, answers, swapped_answers = (
        row[column] for column in ("question", "sub_context", "org_answer", "sub_answer")
    )
    if not isinstance(question, str) or not isinstance(passage, str) or not question.strip():
        raise ExampleError(
            f"{where}: question or sub_context is not text; expected a question and a passage"
        )
    accepted, swapped = (a if isinstance(a, list) else [a] for a in (answers, swapped_answers))
    if all(isinstance(a, str) for a in (*accepted, *swapped)) and any(
        is_among(a, accepted) for a in swapped
    ):
        return (
            f"{question!r} has the same answer in both contexts, {swapped[0]!r}: "
            "there is no conflict"
        )
    context, asked = without_tags(passage), question_prompt(question)
    example = {
        "subject": question.strip(),
        "parametric_answer": answers,
        "context_answer": swapped_answers,
        "prompts": {"clean": asked, "substitution": f"{context} {asked}"},
        "context": context,
        "question": asked,
        "relation": "nq_swap",
    }
    return parse_example(example, where)


def without_tags(text: str) -> str:
    """Drop HTML-like tags and fold white space."""
    return " ".join(TAG.sub(" ", text).split())
