"""MemoTrap (Liu and Liu, 2023): an instruction that asks for an unusual ending of a known text.

    prompt, classes (a list of endings, as text), answer_index (the one that the instruction wants)

The context answer is the requested ending, the parametric answers are the others, both without
final punctuation; an output is right when it begins with the ending. There is only a substitution
prompt: without the instruction there is nothing to ask.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from juice.data.example import ConflictExample, parse_example
from juice.data.judging import is_among
from juice.errors import ExampleError

COLUMNS = ("prompt", "classes", "answer_index")
MAX_SUBJECT = 80


def read_row(row: dict[str, Any], where: str, name: str) -> ConflictExample | str:
    """Make an example from a row, or return why it holds no conflict.

    `name` is the file's, such as `1-proverb-ending`, and becomes the relation.
    """
    endings = [ending.strip().rstrip(".!?") for ending in _classes(row["classes"], where)]
    index = _index(row["answer_index"], len(endings), where)
    others = [ending for i, ending in enumerate(endings) if i != index]
    if is_among(endings[index], others):
        return f"the endings {endings} differ in case or punctuation alone: there is no conflict"
    if not isinstance(row["prompt"], str) or not row["prompt"].strip():
        raise ExampleError(f"{where}: prompt is {row['prompt']!r}; expected text")
    prompt = row["prompt"].strip()
    context, question = _parts(prompt)
    example = {
        "subject": (question or prompt)[:MAX_SUBJECT],
        "parametric_answer": others,
        "context_answer": endings[index],
        "prompts": {"substitution": prompt},
        "context": context,
        "question": question,
        "relation": re.sub(r"^\d+-", "", name).replace("-", "_").lower(),
        "match": "begins",
    }
    return parse_example(example, where)


def _classes(value: Any, where: str) -> list[str]:
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ExampleError(
                f"{where}: classes is {value[:40]!r}; expected a list of endings, "
                "such as [' one.', ' other.']"
            ) from error
    if (
        not isinstance(value, list)
        or len(value) < 2
        or not all(isinstance(ending, str) for ending in value)
    ):
        raise ExampleError(
            f"{where}: classes is not a list of two or more texts; "
            "expected the endings, such as [' one.', ' other.']"
        )
    return value


def _index(value: Any, n: int, where: str) -> int:
    if not re.fullmatch(r"\d{1,4}", str(value)) or int(value) >= n:
        raise ExampleError(
            f"{where}: answer_index is {value!r}; expected a number from 0 to {n - 1}"
        )
    return int(value)


def _parts(prompt: str) -> tuple[str | None, str | None]:
    """Split a prompt into instruction and text: at the first line's end, else the first colon."""
    if "\n" in prompt:
        context, _, question = prompt.partition("\n")
        return context.strip(), question.strip()
    context, colon, question = prompt.partition(": ")
    return (f"{context}:", question.strip()) if colon else (None, None)
