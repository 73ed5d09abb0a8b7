"""Fields of GGUF files that describe tokenizers, without the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import TokenType
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTES = list(bytes_to_unicode().values())


class Fields:
    """A file of nothing but fields, named without `tokenizer.ggml`."""

    path = Path("tiny.gguf")

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def field(self, name: str) -> Any:
        return self.fields.get(name.removeprefix("tokenizer.ggml."))


def byte_level(
    *, merges: tuple[str, ...] = (), control: tuple[str, ...] = (), pre: str, **fields: Any
) -> Fields:
    """Return a file of all bytes, what is merged, and control tokens."""
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in merges), *control]
    kinds = [TokenType.NORMAL] * (len(tokens) - len(control)) + [TokenType.CONTROL] * len(control)
    return Fields(
        model="gpt2", pre=pre, tokens=tokens, token_type=kinds, merges=list(merges), **fields
    )


def scored(tokens: dict[str, float], *, users: tuple[str, ...] = (), **fields: Any) -> Fields:
    """Return a file of tokens with their scores, after the three that all have, and of users'."""
    known = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, **tokens, **dict.fromkeys(users, -1000.0)}
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    kinds += [TokenType.NORMAL] * len(tokens) + [TokenType.USER_DEFINED] * len(users)
    return Fields(
        model="llama", tokens=list(known), scores=list(known.values()), token_type=kinds, **fields
    )
