"""From the text of an answer, as it comes, to its words, its thoughts and its calls.

transformers' `ResponseParser` finds the calls. What looks like one but names no function that may
be called, or is no JSON, stays text: nothing is lost.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from juice_server.tools.formats import Format
from juice_server.tools.offer import Offer

# Mistral's templates take ids of nine letters and digits only.
ID_LENGTH, ID_CHARACTERS = 9, string.ascii_letters + string.digits
NAMED = re.compile(r"\s*(?P<name>[\w.:-]+)(?:\[CALL_ID\]\w+)?\[ARGS\](?P<arguments>.*)", re.DOTALL)


@dataclass(frozen=True)
class Words:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Thought:
    """Text of what the model thinks before it answers, where its tokenizer tells them apart."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call of a function; its arguments are the text of a JSON object, or its beginning."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Arguments:
    """More text of the arguments of the call before it."""

    text: str


Part = Words | Thought | Call | Arguments


class Reader(Protocol):
    """Takes an answer as it comes; the parts of `feed` and `finish` together are all of it."""

    def feed(self, text: str) -> list[Part]:
        """Take more of the answer."""

    def finish(self) -> list[Part]:
        """End the answer."""


class PlainReader:
    """Reads an answer that is words only."""

    def feed(self, text: str) -> list[Part]:
        """Take more of the answer."""
        return [Words(text)] if text else []

    def finish(self) -> list[Part]:
        """End the answer."""
        return []


class CallReader:
    """Reads an answer that may call functions.

    Args:
        form: How the model writes calls.
        offer: What it may call.
        prompt: The text before the answer.
    """

    def __init__(self, form: Format, offer: Offer, prompt: str) -> None:
        self._template, self._offer = load_response_template(dict(form.response_template)), offer
        self._names = {own.name for own in offer.callable}
        self._parser = self._new_parser(prompt if form.is_own else "")
        self._n_calls = 0
        self._marked = {name for name, own in self._template.fields.items() if own.open_re}
        self._unsettled = ""  # fed, but neither text nor call yet
        self._space = ""  # text, unless a call follows
        self._is_after_call = self._is_ending = False

    def feed(self, text: str) -> list[Part]:
        """Take more of the answer."""
        parts: list[Part] = []
        for character in text:  # where one cannot be parsed, nothing else is lost with it
            self._unsettled += character
            try:
                events = self._parser.feed(character)
            except ValueError:
                parts += self._given_up()
                self._parser = self._new_parser("")
            else:
                parts += self._parts(events)
        return joined(parts)

    def finish(self) -> list[Part]:
        """End the answer."""
        self._is_ending = True
        try:
            _, events = self._parser.finalize()
        except ValueError:
            parts = self._given_up()
        else:
            # JSON is whole or not; of anything else, only its end tells that a call is.
            field = self._template.fields["tool_calls"]
            is_closed = field.close_re is not None and field.close_re.search(self._unsettled)
            parts = self._parts(events, are_whole=field.content == "json" or bool(is_closed))
        return joined([*parts, *([] if self._n_calls else self._words("", is_last=True))])

    def _new_parser(self, prompt: str) -> ResponseParser:
        tools = self._offer.for_template()
        return ResponseParser(self._template, prefix=prompt, tools=tools)

    def _parts(self, events: Iterable[dict[str, Any]], *, are_whole: bool = True) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            field, kind, text = event["field"], event["type"], event.get("text", "")
            if field == "tool_calls":
                if kind == "region_close":
                    parts += self._calls(event["value"] if are_whole else None)
            elif kind == "region_chunk":
                self._unsettled = self._unsettled[len(text) :]
                parts += self._words(text) if field == "content" else [Thought(text)]
            elif field in self._marked:  # its marker was read
                self._unsettled = ""
        return parts

    def _calls(self, value: Any) -> list[Part]:
        found, rest = _objects(value) if isinstance(value, str) else (value, "")
        read = [_call(own) for own in (found if isinstance(found, list) else [found])]
        calls = [call for call in read if call is not None and call.name in self._names]
        if not calls or len(calls) < len(read):
            # After calls, what the end of the answer cuts is one more.
            return [] if self._is_ending and self._n_calls else self._given_up()
        self._unsettled, self._space, self._is_after_call = "", "", True
        if self._offer.is_single:
            calls = calls[: 1 - min(self._n_calls, 1)]
        self._n_calls += len(calls)
        # What is left is text, unless it is a call that was cut.
        return [*calls, *([] if rest.startswith("{") else self._words(rest))]

    def _given_up(self) -> list[Part]:
        text, self._unsettled = self._unsettled, ""
        return self._words(text)

    def _words(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Return text, without the white space around calls."""
        text = text.lstrip() if self._is_after_call else self._space + text
        end = len(text) if is_last else len(text.rstrip())
        text, self._space = text[:end], text[end:]
        self._is_after_call = self._is_after_call and not text
        return [Words(text)] if text else []


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return parts with neighbouring texts of a kind as one."""
    made: list[Part] = []
    for part in parts:
        last = made[-1] if made else None
        if isinstance(part, Words | Thought | Arguments) and type(last) is type(part):
            made[-1] = replace(part, text=last.text + part.text)
        else:
            made.append(part)
    return made


def whole(reader: Reader, answer: str) -> list[Part]:
    """Return all parts of an answer, calls with their arguments."""
    made: list[Part] = []
    for part in [*reader.feed(answer), *reader.finish()]:
        last = made[-1] if made else None
        if isinstance(part, Arguments) and isinstance(last, Call):
            made[-1] = replace(last, arguments=last.arguments + part.text)
        else:
            made.append(part)
    return made


def _objects(text: str) -> tuple[list[Any], str]:
    """Return the objects that begin a text which as a whole is no JSON, and what is left of it.

    It may be a name before its arguments, several objects, or a list that was cut.
    """
    if named := NAMED.fullmatch(text):
        return [named.groupdict()], ""
    found: list[Any] = []
    decoder, rest = json.JSONDecoder(), text.strip().removeprefix("[").lstrip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except ValueError:
            return found, rest
        found.append(value)
        rest = rest[end:].lstrip(" \n;,]")
    return found, ""


def _call(value: Any) -> Call | None:
    own = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(own, dict) or not isinstance(own.get("name"), str):
        return None
    arguments = own.get("arguments", own.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    return Call(new_id(), own["name"], json.dumps(arguments, ensure_ascii=False))


def new_id() -> str:
    """Return the id of a new call."""
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
