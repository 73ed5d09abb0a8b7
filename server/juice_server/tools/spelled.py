"""Calls whose form a grammar enforces, read as they come: the name first, then its arguments.

Nothing but text and calls in their spelling can come, unless the answer is cut. So a name and the
pieces of its arguments need not wait for their end, and a call that is cut before its name is
dropped. White space around names and arguments does not count: tokenizers differ in it.
"""

from __future__ import annotations

from collections.abc import Iterable

from juice_server.tools.formats import Spelling
from juice_server.tools.offer import Offer
from juice_server.tools.reading import Arguments, Call, Part, Words, joined, new_id


class SpelledReader:
    """Reads an answer that a grammar has made.

    Args:
        spelling: How calls are written.
        offer: What may be called.
    """

    def __init__(self, spelling: Spelling, offer: Offer) -> None:
        self._spelling, self._offer = spelling, offer
        self._held = ""  # neither text nor call yet
        self._is_before_calls = not offer.must_call
        self._heads: dict[str, str] = {}  # what may come, without white space, and whom it names
        self._scan: _Scan | None = None  # of the arguments that are open
        if offer.must_call:
            self._expect(spelling.marker + spelling.begin)
        elif not spelling.marker:
            self._expect(spelling.begin)

    def feed(self, text: str) -> list[Part]:
        """Take more of the answer."""
        return joined(part for character in text for part in self._take(character))

    def finish(self) -> list[Part]:
        """End the answer."""
        is_text = self._is_before_calls and not self._heads
        return [Words(self._held)] if is_text and self._held else []

    def _take(self, character: str) -> Iterable[Part]:
        if self._scan is not None:
            if self._scan.has_begun or not character.isspace():
                yield Arguments(character)
            if self._scan.ends_with(character):
                self._scan = None
                own = self._spelling
                if not self._offer.is_single:
                    self._expect(own.tail + own.between)
        elif self._heads:
            yield from self._in_head(character)
        elif self._is_before_calls:
            yield from self._in_text(character)

    def _in_head(self, character: str) -> Iterable[Part]:
        """Go on with what names the next function, or leave it if it does not."""
        self._held += character
        read = "".join(self._held.split())
        if read in self._heads:
            yield Call(new_id(), self._heads[read], "")
            self._held, self._heads, self._scan = "", {}, _Scan()
            self._is_before_calls = False
        elif not any(head.startswith(read) for head in self._heads):
            self._heads = {}
            if self._is_before_calls:  # it is text, then
                yield Words(self._held)
            self._held = ""

    def _in_text(self, character: str) -> Iterable[Part]:
        """Give text, up to what may be the marker, and the white space before it."""
        self._held += character
        marker = self._spelling.marker
        if marker and self._held.endswith(marker):
            text = self._held.removesuffix(marker).rstrip()
            self._held, self._is_before_calls = "", False
            self._expect(self._spelling.begin)
        else:
            begun = (n for n in range(len(marker) - 1, 0, -1) if self._held.endswith(marker[:n]))
            end = len(self._held[: len(self._held) - next(begun, 0)].rstrip())
            text, self._held = self._held[:end], self._held[end:]
        if text:
            yield Words(text)

    def _expect(self, before: str) -> None:
        """Wait for the name of a function after some text."""
        for own in self._offer.callable:
            head = before + self._spelling.head.replace("{name}", own.name)
            self._heads["".join(head.split())] = own.name


class _Scan:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False

    @property
    def has_begun(self) -> bool:
        """Whether its first brace was read."""
        return self._depth > 0

    def ends_with(self, character: str) -> bool:
        """Take the next character; return whether it is the last."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            else:
                self._in_string = character != '"'
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False
