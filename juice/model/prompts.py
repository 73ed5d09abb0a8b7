"""The form of a prompt: its tokens, and where in them an answer begins.

plain            tokenizer(prompt); an answer follows after a space
through a chat   the prompt is one user message, rendered by a chat template up to where the
                 assistant's turn begins; the template writes the special tokens, and an answer is
                 the beginning of that turn

A reply may have an opening, such as "The capital of Peru is", which the answer follows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from juice.errors import RequestError, UsageError

Message = dict[str, str]


@dataclass(frozen=True, eq=False)
class PromptForm:
    """One of the two forms, for one tokenizer: with the text of a chat template or without."""

    tokenizer: PreTrainedTokenizerBase
    chat_template: str | None = None

    @cached_property
    def sha256(self) -> str | None:
        """The hash of the chat template; None for plain prompts."""
        return sha256_of(self.chat_template)

    def tokens(self, prompt: str, opening: str = "") -> tuple[int, ...]:
        """Return the tokens of a prompt and of its reply's opening; raises RequestError."""
        if opening:
            return self.joined(prompt, opening)[0]
        is_plain = self.chat_template is None
        return self.encode(prompt if is_plain else self.rendered([user(prompt)]))

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """Return a whole text's tokens; special ones are added where no chat template has them."""
        adds = self.chat_template is None if add_special_tokens is None else add_special_tokens
        return tuple(self.tokenizer(text, add_special_tokens=adds)["input_ids"])

    def first_position(self, prompt: str, start: int) -> int:
        """Return the position of the first token that holds a character from `start` on.

        A space before it does not count. `start` counts the prompt's characters. Raises
        RequestError where the template changes the prompt.
        """
        text = prompt
        if self.chat_template is not None:
            text = self.rendered([user(prompt)])
            if prompt not in text:
                raise RequestError(
                    "the chat template changes the prompt, so its question cannot be found;"
                    " steer all positions",
                    param="steer.positions",
                )
            start += text.rindex(prompt)
        return self.position_in(text, start)

    def position_in(self, text: str, start: int, *, add_special_tokens: bool | None = None) -> int:
        """Return the position of the first token of a whole text from the character `start` on.

        A space before it does not count. Special tokens are added as by `encode`.
        """
        adds = self.chat_template is None if add_special_tokens is None else add_special_tokens
        start += len(text[start:]) - len(text[start:].lstrip())
        if not self.tokenizer.is_fast:
            # It tells no offsets: the tokens that the text before shares with the whole are before.
            before = self.encode(text[:start].rstrip(), add_special_tokens=adds)
            return _first_difference(before, self.encode(text, add_special_tokens=adds))
        encoded = self.tokenizer(text, add_special_tokens=adds, return_offsets_mapping=True)
        spans = encoded["offset_mapping"]
        return next((i for i, (a, b) in enumerate(spans) if b > max(a, start)), len(spans))

    def rendered(
        self, messages: Sequence[Message], options: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        """Return a chat as one text, up to where the assistant's turn begins.

        `options` are what else transformers' `apply_chat_template` and the template take, such as
        `documents` and `add_generation_prompt`, here true by default. Raises RequestError where the
        template refuses the chat.
        """
        given = {"add_generation_prompt": True, **options}
        given |= {"chat_template": self.chat_template, "tokenize": False}
        try:
            return str(self.tokenizer.apply_chat_template(messages, **given))
        except Exception as error:  # whatever a template raises
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error

    def first_token(self, prompt: str, answer: str, opening: str = "") -> int | None:
        """Return the first token of an answer's first word in its place; None if it has none."""
        words = answer.split()
        if not words:
            return None
        ids, start = self.joined(prompt, f"{opening} {words[0]}".lstrip())
        if opening:
            start = _first_difference(ids, self.tokens(prompt, opening))
        return ids[start] if start < len(ids) else None

    def parted(
        self, prompt: str, answers: tuple[str, str], opening: str = ""
    ) -> tuple[tuple[int, ...], tuple[int, int]] | None:
        """Return a prompt with the tokens that two answers to it share, and the next one of each.

        None where all tokens of one answer begin the other.
        """
        one, other = (self.joined(prompt, f"{opening} {a}".lstrip())[0] for a in answers)
        at = _first_difference(one, other)
        return (one[:at], (one[at], other[at])) if at < min(len(one), len(other)) else None

    def joined(self, prompt: str, answer: str) -> tuple[tuple[int, ...], int]:
        """Return the tokens of a prompt followed by an answer, and where the answer begins.

        For a plain prompt, that is the first position at which `prompt + " " + answer` differs from
        the prompt. In a chat the model has already seen the rendered prompt's own tokens when its
        turn begins, so these stay unchanged, whatever they would merge with.
        """
        if self.chat_template is None:
            ids = self.encode(f"{prompt} {answer}")
            return ids, _first_difference(ids, self.encode(prompt))
        text = self.rendered([user(prompt)])
        ids = self.encode(text)
        turn = self._glue(prompt, text, ids, answer) + answer
        return ids + self._behind(text, ids, turn), len(ids)

    def _glue(self, prompt: str, text: str, ids: tuple[int, ...], answer: str) -> str:
        """Return the text between a rendered prompt and an answer, the template's own if known."""
        try:
            turn = self.rendered(
                [user(prompt), {"role": "assistant", "content": answer}],
                {"add_generation_prompt": False},
            )
        except RequestError:
            turn = ""
        before, written, _ = turn.removeprefix(text).partition(answer)
        if turn.startswith(text) and written and not before.strip():
            return before
        # Its finished turns begin differently from an open one, for example with thoughts.
        return (
            ""
            if not ids or text[-1:].isspace() or ids[-1] in self.tokenizer.added_tokens_decoder
            else " "
        )

    def _behind(self, text: str, ids: tuple[int, ...], turn: str) -> tuple[int, ...]:
        """Return the tokens of a turn that follows a text with tokens `ids`."""
        whole = self.encode(text + turn)
        if whole[: len(ids)] == ids:
            return whole[len(ids) :]
        # The end of the text may split differently when something follows: two line ends are one
        # token, but two before a word.
        for start in range(max(0, len(whole) - len(turn.encode())), len(whole)):
            end = whole[start:]
            if self.tokenizer.decode(end, clean_up_tokenization_spaces=False) == turn:
                return end
        return self.encode(turn)


def _first_difference(ids: tuple[int, ...], others: tuple[int, ...]) -> int:
    """Return the first position of `ids` that differs from others, or is beyond them."""
    pairs = zip(ids, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(others)))


def user(prompt: str) -> Message:
    """Return a prompt as a user message."""
    return {"role": "user", "content": prompt}


def own_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a tokenizer's chat template, the one named default of several; None without one."""
    template: Any = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template or None


def sha256_of(template: str | None) -> str | None:
    """Return the SHA-256 of a template's text, in hexadecimal; None without a template."""
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()


def read_template(path: Path) -> str:
    """Return the text of a template file; raises UsageError."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the chat template {path}: {error}; "
            "expected a Jinja template in UTF-8, or `default`"
        ) from error
