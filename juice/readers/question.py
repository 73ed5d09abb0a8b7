"""The prompt that asks a question, after a passage or without one."""

from __future__ import annotations


def question_prompt(question: str) -> str:
    """Return `Question: <question>? Answer:`, with one question mark whatever the question ends with."""
    return f"Question: {question.strip().rstrip(' ?')}? Answer:"
