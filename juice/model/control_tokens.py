"""Control tokens: those that a chat template writes, and that no text which it is given may form.

They are the special tokens of a tokenizer, and others that were added to it, if the template writes
them or if they look like marks, such as <|user|> or [INST]. Runs of spaces, ordinary words and the
tags of HTML, which some tokenizers add too, are text.

A string that goes into a template is guarded: where it has the text of a control token, a mark
stands within (GUARD, a code point that is no character), and at its end where a control token could
go on with what follows. So templates treat it like other text. Text with guards is read by a twin
of the tokenizer, in which all control tokens are called otherwise: those without a guard, which the
template wrote, are called so too, and all that is guarded is text. Text without is read as ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

GUARD, TWIN = "\ufdd0", "\ufdd1"
LIKE_MARKS = re.compile(r"<\|.+\|>|<[^<>\s]*[_|｜][^<>\s]*>|\[/?[A-Z_]+\]", re.DOTALL)


def shown(text: str) -> str:
    """Return guarded text as it is without guards."""
    return re.sub(f"{GUARD}(.?)", r"\1", text, flags=re.DOTALL) if GUARD in text else text


def place_in(text: str, at: int) -> int:
    """Return where in guarded text the character stands that is shown at a place."""
    if GUARD not in text:
        return at
    shows = re.finditer(f"{GUARD}(.?)|.", text, re.DOTALL)
    starts = [found.start() for found in shows if found[0] != GUARD]
    return starts[at] if at < len(starts) else len(text)


@dataclass(frozen=True, eq=False)
class ControlTokens:
    """The control tokens of a tokenizer and of a chat template, if there is one."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None

    @cached_property
    def names(self) -> frozenset[str]:
        """Their texts."""
        return self._special | {
            token.content
            for token in self.tokenizer.added_tokens_decoder.values()
            if token.content.strip()
            and (token.content in (self.template or "") or LIKE_MARKS.fullmatch(token.content))
        }

    def guarded(self, value: Any, *, is_reply: bool = False) -> Any:
        """Return strings, in lists and dictionaries too, of which none forms a control token.

        A reply of the model may hold those that are not special, such as <think>, as it wrote them.
        """
        if isinstance(value, str):
            return self._guarded(value, self._of_replies if is_reply else self._all)
        if isinstance(value, dict):
            each = value.items()
            return {
                self.guarded(k, is_reply=is_reply): self.guarded(v, is_reply=is_reply)
                for k, v in each
            }
        if isinstance(value, list | tuple):
            return [self.guarded(one, is_reply=is_reply) for one in value]
        return value

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of guarded text."""
        if GUARD not in text:
            ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens)[
                "input_ids"
            ]
            return ids
        if self._twin is not None:
            named = self._named(text)
            return list(self._twin.encode(named, add_special_tokens=add_special_tokens).ids)
        # Each piece lacks a part of what is guarded.
        pieces = [shown(piece) for piece in _pieces(text)]
        first, *rest = (
            self.tokenizer(piece, add_special_tokens=add_special_tokens and not i)["input_ids"]
            for i, piece in enumerate(pieces)
        )
        return [*first, *(token for ids in rest for token in ids)]

    def spans(self, text: str, *, add_special_tokens: bool) -> list[tuple[int, int]]:
        """Return where in guarded text each token begins and ends; only of fast tokenizers."""
        if GUARD not in text:
            encoded = self.tokenizer(
                text, add_special_tokens=add_special_tokens, return_offsets_mapping=True
            )
            return list(encoded["offset_mapping"])
        assert self._twin is not None
        found = self._twin.encode(self._named(text), add_special_tokens=add_special_tokens).offsets
        places = _places(text, self._all.pattern)
        return [(places[a], places[b]) for a, b in found]

    @cached_property
    def _special(self) -> frozenset[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def _all(self) -> _Pattern:
        return _Pattern(self.names)

    @cached_property
    def _of_replies(self) -> _Pattern:
        return _Pattern(self._special)

    def _guarded(self, text: str, pattern: _Pattern) -> str:
        text = text.replace(GUARD, GUARD * 2)
        text = pattern.pattern.sub(lambda found: f"{found[0][:1]}{GUARD}{found[0][1:]}", text)
        return f"{text}{GUARD}" if pattern.may_go_on(text) else text

    def _named(self, text: str) -> str:
        """Return guarded text as the twin reads it."""
        return shown(self._all.pattern.sub(lambda found: f"{TWIN}{found[0]}", text))

    @cached_property
    def _twin(self) -> Tokenizer | None:
        if not self.tokenizer.is_fast:
            return None
        parts = json.loads(self.tokenizer.backend_tokenizer.to_str())
        return Tokenizer.from_str(json.dumps(_renamed(parts, self.names)))


class _Pattern:
    """Any of some texts, the longest first, and whether a text could go on as one of them."""

    def __init__(self, names: Iterable[str]) -> None:
        # One character cannot be parted.
        kept = sorted(name for name in names if len(name) > 1)
        self.pattern = re.compile(_any_of(kept) if kept else "(?!)")
        self._begun = {name[:n] for name in kept for n in range(1, len(name))}
        self._longest = max(map(len, kept), default=0)

    def may_go_on(self, text: str) -> bool:
        return any(text[-n:] in self._begun for n in range(1, min(self._longest, len(text)) + 1))


def _any_of(names: Sequence[str]) -> str:
    """Return an expression that tries no beginning twice, however many names there are."""
    if names == [""]:
        return ""
    first = groupby((name for name in names if name), key=lambda name: name[0])
    each = [re.escape(char) + _any_of([name[1:] for name in group]) for char, group in first]
    one = each[0] if len(each) == 1 and "" not in names else f"(?:{'|'.join(each)})"
    return f"{one}?" if "" in names else one


def _pieces(text: str) -> list[str]:
    return re.split(f"(?<!{GUARD}){GUARD}(?!{GUARD})", text)


def _places(text: str, control: re.Pattern[str]) -> list[int]:
    """Return where in guarded text each character stands that the twin reads, and the end."""
    places, names = list[int](), control.pattern
    for found in re.finditer(f"({names})|{GUARD}(?:(?={names})|(.?))|.", text, re.DOTALL):
        if found[1]:
            places += [found.start(), *range(*found.span())]
        elif found[2] or found[0] != GUARD:
            places.append(found.start())
    return [*places, len(text)]


def _renamed(parts: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Return the parts of a tokenizer in which control tokens are called otherwise."""

    def new(name: str) -> str:
        return f"{TWIN}{name}" if name in names else name

    model = parts["model"]
    for token in parts["added_tokens"]:
        token["content"] = new(token["content"])
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
