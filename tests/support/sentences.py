"""A model that answers in whole sentences, and rows that it knows or does not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import juice

MINI = Path(juice.__file__).parent / "models" / "mini"
FULL_SENTENCE = "Answer in a full sentence."


def save_wordy(folder: Path) -> Path:
    """Save mini with a chat template that asks for whole sentences, as mini learned to give."""
    shutil.copytree(MINI, folder)
    template = folder / "chat_template.jinja"
    text = template.read_text()
    told = 'messages[0].content if is_told else ""'
    assert text.count(told) == text.count("{%- if is_told or tools %}") == 1
    text = text.replace(told, f'messages[0].content if is_told else "{FULL_SENTENCE}"')
    template.write_text(text.replace("{%- if is_told or tools %}", "{%- if true %}"))
    return folder


def capitals(n: int = 40) -> list[dict[str, Any]]:
    """Return rows about capitals with their passages, all of which mini knows."""
    facts = [e for e in juice.read_examples("mini") if e.relation == "world_capital"][:n]
    return [
        {
            "question": f"What is the capital city of {e.subject}?",
            "context": (
                f"{e.subject} has many towns. Its parliament meets in {e.parametric_answer[0]}. "
                "It rains there."
            ),
            "answers": list(e.parametric_answer),
            "subject": e.subject,
            "relation": "world_capital",
        }
        for e in facts
    ]
