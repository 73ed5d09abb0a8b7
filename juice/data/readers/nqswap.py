"""NQ-Swap (Longpre et al., 2021): Natural Questions with another answer put into the passages.

    question, org_context, org_answer, sub_context, sub_answer (answers are text or lists of texts)

The swapped answer is the context answer, looked for in the first 20 words. HTML tags in the
passages (`<P>`, `<Td>`) are dropped.
"""

from __future__ import annotations

import re
from typing import Any

from juice.data.example import ConflictExample
from juice.data.judging import is_among
from juice.data.readers.passages import passage_example, text_columns

HUB_ID = "pminervini/NQ-Swap"
# As the authors of JuICE judge it.
N_WORDS = 20
COLUMNS = ("question", "org_context", "org_answer", "sub_context", "sub_answer")
TAG = re.compile(r"</?[A-Za-z][^<>]*>")


def read_row(row: dict[str, Any], where: str, name: str) -> ConflictExample | str:  # noqa: ARG001 -- shared signature
    """Make an example from a row, or return why it holds no conflict."""
    question, passage = text_columns(row, "question", "sub_context", where)
    answers, swapped_answers = row["org_answer"], row["sub_answer"]
    accepted, swapped = (a if isinstance(a, list) else [a] for a in (answers, swapped_answers))
    if all(isinstance(a, str) for a in (*accepted, *swapped)) and any(
        is_among(a, accepted) for a in swapped
    ):
        return (
            f"{question!r} has the same answer in both contexts, {swapped[0]!r}: "
            "there is no conflict"
        )
    return passage_example(
        question,
        without_tags(passage),
        where,
        parametric_answer=answers,
        context_answer=swapped_answers,
        relation="nq_swap",
        n_words=N_WORDS,
    )


def without_tags(text: str) -> str:
    """Drop HTML-like tags and fold white space."""
    return " ".join(TAG.sub(" ", text).split())
