"""Control tokens: those that a chat template writes, and that no text which it is given may form.

They are the special tokens of a tokenizer, and others that were added to it, if the template writes
them or if they look like marks, such as <|user|> or [INST]. Runs of spaces, ordinary words and the
tags of HTML, which some tokenizers add too, are text.

A string that goes into a template is guarded: a mark (GUARD, a symbol that hardly anybody writes,
and that is printed as it is) stands behind every character with which a control token begins, such
as `<`. So templates treat it like other text, and none forms a control token by trimming, cutting
or joining such strings; one that writes the ends of a token around them could. Text with guards is
read by a twin of the tokenizer, in which all control tokens are called otherwise: those without a
guard, which the template wrote, are called so too, and all that is guarded is text. Text without is
read as ever. Of a tokenizer that is not fast there is no twin: guarded text is then read in pieces.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

GUARD = "\U0001d245"
TWIN = f"\ufdd1{secrets.token_hex(8)}\ufdd1"  # which nobody can write
LIKE_MARKS = re.compile(r"<\|.+\|>|<[^<>\s]*[_|｜][^<>\s]*>|\[/?[A-Z_]+\]", re.DOTALL)


def shown(text: str) -> str:
    """Return guarded text as it is without guards; two are one that was in the text."""
    return GUARD.join(part.replace(GUARD, "") for part in text.split(GUARD * 2))


def raw(text: str) -> str:
    """Return text whose control tokens are meant, such as a raw prompt, as guarded text."""
    return text.replace(GUARD, GUARD * 2)


def place_in(text: str, at: int) -> int:
    """Return where in guarded text the character stands that is shown at a place."""
    if GUARD not in text:
        return at
    shows = re.finditer(f"{GUARD}(.?)|.", text, re.DOTALL)
    starts = [found.start() for found in shows if found[0] != GUARD]
    return starts[at] if at < len(starts) else len(text)


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with its strings changed, in lists and dictionaries too.

    Keys that are names stay: templates look for them.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            key if str(key).isidentifier() else mapped(key, change): mapped(one, change)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [mapped(one, change) for one in value]
    return value


@dataclass(frozen=True, eq=False)
class ControlTokens:
    """The control tokens of a tokenizer and of a chat template, if there is one."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None

    @staticmethod
    @lru_cache(maxsize=8)
    def of(tokenizer: PreTrainedTokenizerBase, template: str | None) -> ControlTokens:
        """Return those of a tokenizer and a template, made once."""
        return ControlTokens(tokenizer, template)

    @cached_property
    def names(self) -> frozenset[str]:
        """Their texts; one of a single character could not be told from text."""
        others = (token.content for token in self.tokenizer.added_tokens_decoder.values())
        return self._special | {
            name
            for name in others
            if len(name.strip()) > 1
            and not re.fullmatch(r"\w+", name)
            and (name in (self.template or "") or LIKE_MARKS.fullmatch(name))
        }

    def prepare(self) -> None:
        """Make what takes seconds where there are many tokens, before the first text comes."""
        self.encode(self.guarded(min(self.names, default="")), add_special_tokens=False)

    def guarded(self, text: str, *, is_reply: bool = False) -> str:
        """Return text of which no part forms a control token.

        A reply of the model may hold some as it wrote them, such as <think>: those that are not
        special, and that the template does not write for a user's turn.
        """
        guards = self._guards_of_replies if is_reply else self._guards
        return guards.sub(rf"\g<0>{GUARD}", raw(text))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of guarded text."""
        if not self._needs_twin(text):
            return self._ids(shown(text), add_special_tokens=add_special_tokens)
        if self._twin is not None:
            return list(self._read(self._twin, text, add_special_tokens=add_special_tokens).ids)
        # Each piece lacks a part of what is guarded.
        pieces = [shown(piece) for piece in re.split(LONE_GUARD, text)]
        first, *rest = (
            self._ids(piece, add_special_tokens=add_special_tokens and not i)
            for i, piece in enumerate(pieces)
        )
        return [*first, *(token for ids in rest for token in ids)]

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # It would warn of texts longer than the model reads, some of which are only cut to pieces.
        found = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return list(found["input_ids"])

    def spans(self, text: str, *, add_special_tokens: bool) -> list[tuple[int, int]]:
        """Return where in guarded text each token begins and ends; only of fast tokenizers."""
        if GUARD not in text and not self._needs_twin(text):
            encoded = self.tokenizer(
                text, add_special_tokens=add_special_tokens, return_offsets_mapping=True
            )
            return list(encoded["offset_mapping"])
        assert self._twin is not None, "the tokenizer is fast"
        found = self._read(self._twin, text, add_special_tokens=add_special_tokens).offsets
        places = _places(text, self._unguarded)
        return [(places[a], places[b]) for a, b in found]

    def _needs_twin(self, text: str) -> bool:
        return self._may_be_spelled_otherwise or re.search(LONE_GUARD, text) is not None

    @cached_property
    def _may_be_spelled_otherwise(self) -> bool:
        """Whether a normalizer could make a control token of text that has no guard."""
        if not self.tokenizer.is_fast or self.tokenizer.backend_tokenizer.normalizer is None:
            return False
        added = self.tokenizer.added_tokens_decoder.values()
        return any(token.normalized for token in added if token.content in self.names)

    @cached_property
    def _special(self) -> frozenset[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        names = {token.content for token in added if token.special}
        return frozenset(name for name in names | {*self.tokenizer.all_special_tokens} if name[1:])

    @cached_property
    def _unguarded(self) -> re.Pattern[str]:
        return re.compile(_any_of(sorted(self.names)) if self.names else "(?!)")

    @cached_property
    def _guards(self) -> re.Pattern[str]:
        return _begins(self.names)

    @cached_property
    def _guards_of_replies(self) -> re.Pattern[str]:
        return _begins(self.names - self._of_replies, but_not=self._of_replies)

    @cached_property
    def _of_replies(self) -> frozenset[str]:
        """Those that a reply may hold; none where the template refuses the chat that tells."""
        chat = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
        how: dict[str, Any] = {"chat_template": self.template, "tokenize": False}
        try:
            whole, before = (self.tokenizer.apply_chat_template(c, **how) for c in (chat, chat[:2]))
        except Exception:  # whatever a template raises
            return frozenset()
        others = self.names - self._special
        return frozenset(name for name in others if whole.count(name) <= before.count(name))

    def _named(self, text: str) -> str:
        """Return guarded text as the twin reads it."""
        return shown(self._unguarded.sub(rf"{TWIN}\g<0>", text))

    def _read(self, twin: Tokenizer, text: str, *, add_special_tokens: bool) -> Encoding:
        # As a batch: while it reads a text by itself, no other thread of Python runs.
        named = [self._named(text)]
        return twin.encode_batch(named, add_special_tokens=add_special_tokens)[0]

    @cached_property
    def _twin(self) -> Tokenizer | None:
        if not self.tokenizer.is_fast:
            return None
        parts = json.loads(self.tokenizer.backend_tokenizer.to_str())
        return Tokenizer.from_str(json.dumps(_renamed(parts, self.names)))


# The first of an odd number of guards: the others are pairs.
LONE_GUARD = re.compile(f"(?<!{GUARD}){GUARD}(?=(?:{GUARD}{GUARD})*(?!{GUARD}))")


def _begins(names: frozenset[str], but_not: frozenset[str] = frozenset()) -> re.Pattern[str]:
    """Return what finds the characters with which a control token could begin.

    Of a name that begins like a word those alone that go on as the name does.
    """
    marks = {name[0] for name in names if not (name[0].isalnum() or name[0].isspace())}
    words = sorted(name for name in names if name[0] not in marks)
    either = [f"[{''.join(map(re.escape, sorted(marks)))}]"] if marks else []
    either += [f"(?:{first})(?={rest})" for first, rest in _parted(words)]
    left = f"(?!{_any_of(sorted(but_not))})" if but_not else ""
    return re.compile(f"{left}(?:{'|'.join(either)})" if either else "(?!)")


def _parted(names: Sequence[str]) -> Iterable[tuple[str, str]]:
    for first, group in groupby(names, key=lambda name: name[0]):
        yield re.escape(first), _any_of([name[1:] for name in group])


def _any_of(names: Sequence[str]) -> str:
    """Return an expression that tries no beginning twice, however many names there are."""
    if names == [""]:
        return ""
    first = groupby((name for name in names if name), key=lambda name: name[0])
    each = [re.escape(char) + _any_of([name[1:] for name in group]) for char, group in first]
    one = each[0] if len(each) == 1 and "" not in names else f"(?:{'|'.join(each)})"
    return f"{one}?" if "" in names else one


def _places(text: str, control: re.Pattern[str]) -> list[int]:
    """Return where in guarded text each character stands that the twin reads, and the end."""
    places, names = list[int](), control.pattern
    for found in re.finditer(f"({names})|{GUARD}(?:(?={names})|(.?))|.", text, re.DOTALL):
        if found[1]:
            places += [found.start()] * len(TWIN) + [*range(*found.span())]
        elif found[2] or found[0] != GUARD:
            places.append(found.start())
    return [*places, len(text)]


def _renamed(parts: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Return the parts of a tokenizer in which control tokens are called otherwise."""

    def new(name: str) -> str:
        return f"{TWIN}{name}" if name in names else name

    model = parts["model"]
    parts["truncation"] = parts["padding"] = None
    for token in parts["added_tokens"]:
        if token["content"] in names:
            token |= {"content": new(token["content"]), "normalized": False}
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {new(name): number for name, number in vocabulary.items()}
    else:
        model["vocab"] = [[new(name), score] for name, score in vocabulary]
    if "merges" in model:
        model["merges"] = [
            pair
            for pair in model["merges"]
            if names.isdisjoint(two := pair.split(" ") if isinstance(pair, str) else pair)
            and "".join(two) not in names
        ]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = new(model["unk_token"])
    return parts
