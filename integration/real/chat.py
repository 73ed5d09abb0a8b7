"""Forty chat prompts, each a document that contradicts what models know and a question about it.

The document is the context of a user's turn and the question follows it (`prompts.jsonl`). Of whole
answers of 24 tokens, the rows give the shares that hold an answer of memory, and of the context.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from integration.real.answers import UNSTEERED, Row, Way, share_row
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

FILE = Path(__file__).with_name("prompts.jsonl")
N_TOKENS = 24
PART = "chat"


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A question, a document that answers it falsely, and the answers of both."""

    question: str
    document: str
    memory: tuple[str, ...]
    context: tuple[str, ...]


def chat_prompts() -> list[ChatPrompt]:
    """Return the prompts."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return [ChatPrompt(**json.loads(line)) for line in lines]


def holds(text: str, answers: Sequence[str]) -> bool:
    """Return whether one of the answers begins a word of a text, which may go on after it."""
    return any(re.search(rf"(?<!\w){re.escape(a)}", text, re.IGNORECASE) for a in answers)


def in_chat(
    model: SteeredModel,
    ways: Sequence[Way],
    prompts: Sequence[ChatPrompt],
    progress: Progress = silent,
) -> Iterator[Row]:
    """Yield the shares of both answers, unsteered and by each way, on a model that takes a chat."""
    for way in (UNSTEERED, *ways):
        done = model.generate(
            [prompt.question for prompt in prompts],
            context=[prompt.document for prompt in prompts],
            steer=way.steer,
            max_tokens=N_TOKENS,
            progress=progress,
        )
        target = "" if way is UNSTEERED else f"{way.steer.target}, "
        for kind in ("memory", "context"):
            hits = [holds(c.text, getattr(p, kind)) for c, p in zip(done, prompts, strict=True)]
            yield share_row(PART, kind, f"{target}{way.name}", hits)
