"""The chat template of the bundled model, rendered as its tokenizer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment

BEGIN, END = "<|begin|>", "<|end|>"
ROLES = ("<|system|>", "<|document|>", "<|user|>", "<|assistant|>")
TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
_COMPILED = Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)  # noqa: S701


def render(messages: list[dict[str, str]], documents: list[dict[str, str]]) -> str:
    """Return a dialogue as text with role tokens."""
    values: dict[str, Any] = {"bos_token": BEGIN, "eos_token": END}
    return _COMPILED.render(messages=messages, documents=documents, **values)
