"""How a prompt becomes tokens, and where in them an answer begins.

as it is         tokenizer(prompt); an answer goes on behind a space
through a chat   the prompt is one message of the user, rendered by a chat template up to where the assistant's turn begins; the
                 special tokens are those that the template writes, and an answer is the beginning of that turn
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from juice.errors import RequestError, UsageError

Message = dict[str, str]


@dataclass(frozen=True, eq=False)
class PromptForm:
    """One of the two forms, for one tokenizer: with the text of a chat template, or without."""

    tokenizer: PreTrainedTokenizerBase
    chat_template: str | None = None

    @cached_property
    def sha256(self) -> str | None:
        """The hash of the chat template; None for prompts as they are."""
        return sha256_of(self.chat_template)

    def tokens(self, prompt: str) -> tuple[int, ...]:
        """Return the tokens of a prompt; raises RequestError where the template refuses it."""
        return (
            self.encode(prompt)
            if self.chat_template is None
            else self.encode(self.rendered([user(prompt)]))
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a whole text: a template has put the special tokens in place, else the tokenizer adds its own."""
        return tuple(
            self.tokenizer(text, add_special_tokens=self.chat_template is None)["input_ids"]
        )

    def rendered(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return a chat as one text, up to where the assistant's turn begins.

        Raises RequestError where the template refuses it.
        """
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    chat_template=self.chat_template,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except Exception as error:  # whatever a template raises
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error

    def first_token(self, prompt: str, answer: str) -> int | None:
        """Return the first token of an answer's first word where it goes on from a prompt; None if it has none of its own."""
        words = answer.split()
        if not words:
            return None
        ids, start = self.joined(prompt, words[0])
        return ids[start] if start < len(ids) else None

    def joined(self, prompt: str, answer: str) -> tuple[tuple[int, ...], int]:
        """Return the tokens of a prompt with an answer behind it, and the position at which the answer begins.

        As it is, that is the first position at which `prompt + " " + answer` differs from the
        prompt. In a chat the model has read the rendered prompt's own tokens when its turn begins,
        so these stay as they are, whatever they would merge with.
        """
        if self.chat_template is None:
            alone, ids = self.encode(prompt), self.encode(f"{prompt} {answer}")
            return ids, next(
                (i for i, token in enumerate(ids) if i >= len(alone) or token != alone[i]), len(ids)
            )
        text = self.rendered([user(prompt)])
        ids = self.encode(text)
        return ids + self._behind(text, ids, self._glue(prompt, text, ids, answer) + answer), len(
            ids
        )

    def _glue(self, prompt: str, text: str, ids: tuple[int, ...], answer: str) -> str:
        """Return what stands between a rendered prompt and the answer: what the template itself writes there, where it tells."""
        try:
            turn = self.rendered(
                [user(prompt), {"role": "assistant", "content": answer}],
                add_generation_prompt=False,
            )
        except RequestError:
            turn = ""
        before, found, _ = turn.removeprefix(text).partition(answer)
        if turn.startswith(text) and found and not before.strip():
            return before
        # Its turns begin otherwise than the prompt for one, with thoughts for example.
        return (
            ""
            if not ids or text[-1:].isspace() or ids[-1] in self.tokenizer.added_tokens_decoder
            else " "
        )

    def _behind(self, text: str, ids: tuple[int, ...], turn: str) -> tuple[int, ...]:
        """Return the tokens of what is said behind a text that has these tokens."""
        whole = self.encode(text + turn)
        if whole[: len(ids)] == ids:
            return whole[len(ids) :]
        # The text's end is split otherwise where something follows: two line ends are one token, or
        # two before a word.
        ends = (
            whole[start:] for start in range(max(0, len(whole) - len(turn.encode())), len(whole))
        )
        spelled = (
            end
            for end in ends
            if self.tokenizer.decode(end, clean_up_tokenization_spaces=False) == turn
        )
        return next(spelled, None) or self.encode(turn)


def user(prompt: str) -> Message:
    """Return a prompt as the user's message."""
    return {"role": "user", "content": prompt}


def own_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the text of a tokenizer's chat template, that named default where it has several; None where it has none."""
    template: Any = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template or None


def sha256_of(template: str | None) -> str | None:
    """Return the SHA-256 of a template's text, in hexadecimal; None where there is none."""
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()


def read_template(path: Path) -> str:
    """Return the text of a template's file; raises UsageError."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the chat template {path}: {error}; expected a Jinja template in UTF-8, or"
            " `default`"
        ) from error
