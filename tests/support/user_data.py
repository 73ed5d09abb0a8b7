"""Rows as a user's own data has them: questions with a passage, and for fine-tuning."""

from __future__ import annotations

from typing import Any

import juice
from juice.data.readers.rows import Row


def rows(*values: dict[str, Any]) -> list[Row]:
    return [Row(f"data:{i}", row) for i, row in enumerate(values, 1)]


def languages(n: int = 40) -> list[dict[str, Any]]:
    """Return rows about official languages, with passages.

    mini knows most; the name of every fifth country is read backwards, which nobody knows.
    """
    facts = [e for e in juice.read_examples("mini") if e.relation == "official_language"][:n]
    subjects = [e.subject if i % 5 else e.subject[::-1].title() for i, e in enumerate(facts)]
    return [
        {
            "question": f"What is the official language of {subject}?",
            "context": (
                f"{subject} has many towns. Schools there teach in {e.parametric_answer[0]}. It"
                " rains."
            ),
            "answers": list(e.parametric_answer),
            "subject": subject,
            "relation": "official_language",
        }
        for subject, e in zip(subjects, facts, strict=True)
    ]


def finetuning(*answers: str) -> list[Row]:
    return rows(
        *(
            {"question": f"Word {i} of them is", "context": "c", "answer": answer}
            for i, answer in enumerate(answers)
        )
    )
