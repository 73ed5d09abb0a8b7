"""Rows as a user's own data has them: questions with a passage, and for fine-tuning."""

from __future__ import annotations

from typing import Any

import juice
from juice.data.readers.rows import Row


def rows(*values: dict[str, Any]) -> list[Row]:
    return [Row(f"data:{i}", row) for i, row in enumerate(values, 1)]


def languages(n: int = 40) -> list[dict[str, Any]]:
    """Return rows about official languages, with true passages; mini knows about an eighth."""
    facts = [e for e in juice.read_examples("mini") if e.relation == "official_language"][:n]
    return [
        {
            "question": f"What is the official language of {e.subject}?",
            "context": (
                f"{e.subject} has many towns. Schools there teach in {e.parametric_answer[0]}. It"
                " rains."
            ),
            "answers": list(e.parametric_answer),
            "subject": e.subject,
            "relation": "official_language",
        }
        for e in facts
    ]


def finetuning(*answers: str) -> list[Row]:
    return rows(
        *(
            {"question": f"Word {i} of them is", "context": "c", "answer": answer}
            for i, answer in enumerate(answers)
        )
    )
