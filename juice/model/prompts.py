"""The form of a prompt: its tokens, and where in them an answer begins.

plain            tokenizer(prompt); an answer follows after a space, unless the prompt ends in white
                 space, or the answer is in a script without spaces between words
through a chat   the prompt is one user message, rendered by a chat template up to where the
                 assistant's turn begins; the template writes the special tokens, and an answer is
                 the beginning of that turn

A reply may have an opening, such as "The capital of Peru is", which the answer follows.

What a template is given is data: it forms no control tokens (`control_tokens`). Roles are words,
so that they form none either. A plain prompt is the caller's own, and may hold them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from juice.data.passages import followed, glue_between
from juice.errors import RequestError, UsageError
from juice.model.control_tokens import ControlTokens, mapped, place_in, raw, shown

Message = dict[str, str]
ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
SAID = ("content", "reasoning_content")  # of a message, by whoever speaks
N_AROUND = 4  # tokens, before and behind where an answer should begin


@dataclass(frozen=True, eq=False)
class PromptForm:
    """One of the two forms, for one tokenizer: with the text of a chat template or without.

    Args:
        tokenizer: The tokenizer.
        chat_template: The template's text; None for plain prompts.
        allows_control_tokens: Whether what a template is given may form control tokens.
    """

    tokenizer: PreTrainedTokenizerBase
    chat_template: str | None = None
    allows_control_tokens: bool = False

    @cached_property
    def sha256(self) -> str | None:
        """The hash of the chat template; None for plain prompts."""
        return sha256_of(self.chat_template)

    @staticmethod
    def raw(text: str) -> str:
        """Return text whose control tokens are meant, such as a raw prompt, as guarded text."""
        return raw(text)

    @staticmethod
    def shown(text: str) -> str:
        """Return guarded text without its guards."""
        return shown(text)

    @staticmethod
    def checked(text: str) -> str:
        """Return a prompt; raises RequestError for one that is empty, or not valid Unicode."""
        if not text:
            raise RequestError("the prompt is empty; expected some text", param="prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not text: {error.reason} at character {error.start}; send valid"
                " Unicode",
                param="prompt",
            ) from error
        return text

    @staticmethod
    def join_context(context: str, prompt: str) -> str:
        """Put a context before a prompt, with a space between unless one has white space there."""
        glue = "" if not context or context[-1].isspace() or prompt[:1].isspace() else " "
        return f"{context}{glue}{prompt}"

    def tokens(self, prompt: str, opening: str = "") -> tuple[int, ...]:
        """Return the tokens of a prompt and of its reply's opening; raises RequestError."""
        return self.joined(prompt, opening)[0] if opening else self._asked(prompt)[1]

    @cached_property
    def _asked(self) -> Callable[[str], tuple[str, tuple[int, ...]]]:
        """What gives a prompt as guarded text, and its tokens, and keeps the last few.

        Each of the answers that may follow a prompt asks for them.
        """

        @lru_cache(maxsize=4)
        def asked(prompt: str) -> tuple[str, tuple[int, ...]]:
            is_plain = self.chat_template is None
            text = self.raw(prompt) if is_plain else self.rendered([user(prompt)])
            return text, self.encode(text)

        return asked

    @property
    def control(self) -> ControlTokens:
        """The control tokens of the template, of the tokenizer's own for plain prompts."""
        template = self.chat_template or own_template(self.tokenizer)
        return ControlTokens.of(self.tokenizer, template)

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """Return a whole guarded text's tokens.

        Special ones are added where no chat template has them, before the text alone: what a
        tokenizer for training puts behind it would end a prompt that goes on.
        """
        adds = self.chat_template is None if add_special_tokens is None else add_special_tokens
        ids = tuple(self.control.encode(text, add_special_tokens=adds))
        return ids[: len(ids) - self._n_behind] if adds else ids

    @cached_property
    def _n_behind(self) -> int:
        """The number of special tokens that the tokenizer puts behind a text."""
        word = self.control.encode("a", add_special_tokens=False)
        whole = self.control.encode("a", add_special_tokens=True)
        n = len(word)
        starts = (i for i in range(len(whole) - n + 1) if whole[i : i + n] == word)
        return len(whole) - n - next(starts, len(whole) - n)

    def behind(self, context: str, prompt: str) -> str:
        """Return a prompt behind its context, which is data, as guarded text."""
        whole = self.checked(self.join_context(context, prompt))
        if self.chat_template is not None:
            return self.rendered([user(whole)])
        return str(self.data(whole[: len(whole) - len(prompt)])) + self.raw(prompt)

    def data(self, value: Any, *, is_reply: bool = False) -> Any:
        """Return what a template is given, or a reply of the model, as guarded text."""
        if self.allows_control_tokens:
            return mapped(value, raw)
        return mapped(value, partial(self.control.guarded, is_reply=is_reply))

    def _turn(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message of which all but the role is data; what a reply says is the model's.

        Raises RequestError for a role that is not a word.
        """
        role = turn.get("role")
        if role is not None and not (isinstance(role, str) and ROLE.fullmatch(role)):
            raise RequestError(
                f"the role of a message is {role!r}; expected a word of at most 64 letters, digits,"
                " _, . and -, such as user",
                param="messages",
            )
        is_reply = role == "assistant"
        return {
            key: value if key == "role" else self.data(value, is_reply=is_reply and key in SAID)
            for key, value in turn.items()
        }

    def position_behind(self, context: str, prompt: str) -> int:
        """Return the position of a prompt's first token behind its context, as `first_position`."""
        if self.chat_template is None:
            text = self.behind(context, prompt)
            return self.position_in(text, len(text) - len(self.raw(prompt)))
        whole = self.join_context(context, prompt)
        return self.first_position(whole, len(whole) - len(prompt))

    def first_position(self, prompt: str, start: int) -> int:
        """Return the position of the first token that holds a character from `start` on.

        A space before it does not count. `start` counts the prompt's characters. Raises
        RequestError where the template changes the prompt.
        """
        if self.chat_template is None:
            return self.position_in(self.raw(prompt), len(self.raw(prompt[:start])))
        text, words = self.rendered([user(prompt)]), self.data(prompt)
        if words not in text:
            raise RequestError(
                "the chat template changes the prompt, so its question cannot be found;"
                " steer all positions",
                param="steer.positions",
            )
        return self.position_in(text, text.rindex(words) + place_in(words, start))

    def position_in(self, text: str, start: int, *, add_special_tokens: bool | None = None) -> int:
        """Return the position of the first token of guarded text from the character `start` on.

        A space before it does not count. Special tokens are added as by `encode`.
        """
        adds = self.chat_template is None if add_special_tokens is None else add_special_tokens
        start += len(text[start:]) - len(text[start:].lstrip())
        if not self.tokenizer.is_fast:
            # It tells no offsets: the tokens that the text before shares with the whole are before.
            before = self.encode(text[:start].rstrip(), add_special_tokens=adds)
            return _first_difference(before, self.encode(text, add_special_tokens=adds))
        spans = self.control.spans(text, add_special_tokens=adds)
        n = len(spans) - (self._n_behind if adds else 0)
        return next((i for i, (a, b) in enumerate(spans) if b > max(a, start)), n)

    def rendered(
        self, messages: Sequence[Message], options: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        """Return a chat as guarded text, up to where the assistant's turn begins.

        `options` are what else transformers' `apply_chat_template` and the template take, such as
        `documents` and `add_generation_prompt`, here true by default. Raises RequestError where the
        template refuses the chat, or a role is not a word.
        """
        given = {"add_generation_prompt": True, **self.data(dict(options))}
        given |= {"chat_template": self.chat_template, "tokenize": False}
        turns = [self._turn(turn) for turn in messages]
        try:
            return str(self.tokenizer.apply_chat_template(turns, **given))
        except Exception as error:  # whatever a template raises
            raise RequestError(
                f"the chat template refuses these messages: {shown(str(error))}", param="messages"
            ) from error

    def first_token(self, prompt: str, answer: str, opening: str = "") -> int | None:
        """Return the first token of an answer's first word in its place; None if it has none."""
        words = answer.split()
        if not words:
            return None
        ids, start = self.joined(prompt, followed(opening, words[0]).lstrip())
        if opening:
            start = _first_difference(ids, self.tokens(prompt, opening))
        return ids[start] if start < len(ids) else None

    def parted(
        self, prompt: str, answers: tuple[str, str], opening: str = ""
    ) -> tuple[tuple[int, ...], tuple[int, int]] | None:
        """Return a prompt with the tokens that two answers to it share, and the next one of each.

        None where all tokens of one answer begin the other.
        """
        one, other = (self.joined(prompt, followed(opening, a).lstrip())[0] for a in answers)
        at = _first_difference(one, other)
        return (one[:at], (one[at], other[at])) if at < min(len(one), len(other)) else None

    def joined(self, prompt: str, answer: str) -> tuple[tuple[int, ...], int]:
        """Return the tokens of a prompt followed by an answer, and where the answer begins.

        For a plain prompt, that is the first position at which `prompt + " " + answer` differs from
        the prompt. Without the space, and in a chat, the model has already seen the prompt's own
        tokens when the answer begins, so these stay unchanged, whatever they would merge with.
        """
        is_plain, (text, ids) = self.chat_template is None, self._asked(prompt)
        if is_plain and glue_between(prompt, answer):
            whole = self.encode(self.raw(followed(prompt, answer)))
            return whole, _first_difference(whole, ids)
        turn = self.raw(answer)
        if not is_plain:
            turn = self._glue(prompt, text, ids, answer) + self._reply(answer)
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
        before, written, _ = turn.removeprefix(text).partition(self._reply(answer))
        if turn.startswith(text) and written and not before.strip():
            return before
        # Its finished turns begin differently from an open one, for example with thoughts.
        return (
            ""
            if not ids or ids[-1] in self.tokenizer.added_tokens_decoder
            else glue_between(text, answer)
        )

    def _reply(self, answer: str) -> str:
        return str(self.data(answer, is_reply=True))

    def _behind(self, text: str, ids: tuple[int, ...], turn: str) -> tuple[int, ...]:
        """Return the tokens of a turn that follows a text with tokens `ids`."""
        whole = self.encode(text + turn)
        if whole[: len(ids)] == ids:
            return whole[len(ids) :]
        # The end of the text may split differently when something follows: two line ends are one
        # token, but two before a word.
        words, alone = shown(turn), self.encode(turn, add_special_tokens=False)
        near = len(whole) - len(alone)  # its beginning may split differently, too
        for start in range(max(0, near - N_AROUND), min(len(whole), near + N_AROUND + 1)):
            end = whole[start:]
            if self.tokenizer.decode(end, clean_up_tokenization_spaces=False) == words:
                return end
        return alone


def _first_difference(ids: tuple[int, ...], others: tuple[int, ...]) -> int:
    """Return the first position of `ids` that differs from others, or is beyond them."""
    pairs = zip(ids, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(others)))


def user(prompt: str) -> Message:
    """Return a prompt as a user message."""
    return {"role": "user", "content": prompt}


def own_template(tokenizer: PreTrainedTokenizerBase, name: str = "default") -> str | None:
    """Return a tokenizer's chat template, the one of a name if it has several; None without one."""
    template: Any = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get(name, template.get("default"))
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
