"""The calls in answers: the grammar that enforces them, and the readers that find them.

A reader takes the text of an answer as it comes and gives its words, its thoughts and its calls.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic_core import from_json
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from juice.engine.structure import Structure, Structures
from juice.engine.structure_sandbox import json_rule
from juice.errors import RequestError
from juice_server.tools import FORMATS, Format, Offer, Spelling

# Mistral's templates take ids of nine letters and digits only.
ID_LENGTH, ID_CHARACTERS = 9, string.ascii_letters + string.digits
# What parsers of JSON raise, the second where it is nested too deeply.
NOT_JSON = (ValueError, RecursionError)
NAMED = re.compile(r"\s*(?P<name>[\w.:-]+)(?:\[CALL_ID\]\w+)?\[ARGS\](?P<arguments>.*)", re.DOTALL)


@dataclass(frozen=True)
class Text:
    """A piece of text in an answer."""

    text: str

    def emptied(self) -> Self:
        """Return it as a stream begins it."""
        return replace(self, text="")


class Words(Text):
    """Text of the answer."""


class Thought(Text):
    """Text of what the model thinks before it answers, where its tokenizer tells them apart."""


class Arguments(Text):
    """More text of the arguments of the call before it."""


@dataclass(frozen=True)
class Call:
    """A call of a function; its arguments are the text of a JSON object, or its beginning."""

    id: str
    name: str
    arguments: str

    @property
    def text(self) -> str:
        return self.arguments

    def emptied(self) -> Self:
        return replace(self, arguments="")


WholePart = Words | Thought | Call
Part = WholePart | Arguments


class Reader:
    """Takes an answer as it comes; this one reads it as words only.

    The parts of `feed` and `finish` together are all of it.
    """

    def feed(self, text: str) -> list[Part]:
        """Take more of the answer."""
        return [Words(text)] if text else []

    def finish(self) -> list[Part]:
        """End the answer."""
        return []


class CallReader(Reader):
    """Reads an answer that may call functions, whose form nothing enforces.

    transformers' `ResponseParser` finds the calls. What looks like one but names no function that
    may be called, or is no JSON that can be sent, stays text: nothing is lost.
    """

    def __init__(self, form: Format, offer: Offer, prompt: str) -> None:
        self._template, self._offer = load_response_template(dict(form.response_template)), offer
        self._names = {function.name for function in offer.callable}
        self._marked = {name for name, field in self._template.fields.items() if field.open_re}
        self._parser = self._new_parser(prompt if form.is_own else "")
        self._n_calls = 0
        self._unsettled = ""  # fed, but neither text nor call yet
        self._space = ""  # text, unless a call follows
        self._is_after_call = self._is_ending = False

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        for character in text:  # where one cannot be parsed, nothing else is lost with it
            self._unsettled += character
            try:
                events = self._parser.feed(character)
            except NOT_JSON:
                parts += self._given_up()
                self._parser = self._new_parser("")
            else:
                parts += self._parts(events)
        return joined(parts)

    def finish(self) -> list[Part]:
        self._is_ending = True
        try:
            _, events = self._parser.finalize()
        except NOT_JSON:
            parts = self._given_up()
        else:
            # JSON is whole or not; of anything else, only its end tells that a call is.
            field = self._template.fields["tool_calls"]
            is_closed = field.close_re is not None and field.close_re.search(self._unsettled)
            parts = self._parts(events, are_whole=field.content == "json" or bool(is_closed))
        return joined([*parts, *([] if self._n_calls else self._words("", is_last=True))])

    def _new_parser(self, prompt: str) -> ResponseParser:
        return ResponseParser(self._template, prefix=prompt, tools=self._offer.for_template())

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
        read = [_call(item) for item in (found if isinstance(found, list) else [found])]
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
        if isinstance(part, Text) and type(last) is type(part):
            made[-1] = replace(part, text=last.text + part.text)
        else:
            made.append(part)
    return made


def whole(reader: Reader, answer: str) -> list[WholePart]:
    """Return all parts of an answer: neighbouring texts as one, calls with their arguments."""
    made: list[WholePart] = []
    for part in joined([*reader.feed(answer), *reader.finish()]):
        if not isinstance(part, Arguments):
            made.append(part)
        elif isinstance(last := made[-1], Call):
            made[-1] = replace(last, arguments=last.arguments + part.text)
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
        except NOT_JSON:
            return found, rest
        found.append(value)
        rest = rest[end:].lstrip(" \n;,]")
    return found, ""


def _call(value: Any) -> Call | None:
    called = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(called, dict) or not isinstance(called.get("name"), str):
        return None
    arguments = called.get("arguments", called.get("parameters", {}))
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        from_json(text.encode())  # as clients read it, who know no lone surrogates
    except NOT_JSON:
        return None
    return Call(new_id(), called["name"], text) if isinstance(arguments, dict) else None


def new_id() -> str:
    """Return the id of a new call."""
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))


class SpelledReader(Reader):
    """Reads an answer whose form a grammar enforces: a call's name first, then its arguments.

    Nothing but text and calls in their spelling can come, unless the answer is cut. So a name and
    the pieces of its arguments need not wait for their end, and a call that is cut before its name
    is dropped. White space around names and arguments does not count: tokenizers differ in it.
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
        return joined(part for character in text for part in self._take(character))

    def finish(self) -> list[Part]:
        is_text = self._is_before_calls and not self._heads
        return [Words(self._held)] if is_text and self._held else []

    def _take(self, character: str) -> Iterable[Part]:
        if self._scan is not None:
            if self._scan.depth or not character.isspace():
                yield Arguments(character)
            if self._scan.ends_with(character):
                self._scan = None
                if not self._offer.is_single:
                    self._expect(self._spelling.tail + self._spelling.between)
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
        for function in self._offer.callable:
            head = before + self._spelling.head.replace("{name}", function.name)
            self._heads["".join(head.split())] = function.name


class _Scan:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self.depth, self._in_string, self._is_escaped = 0, False, False

    def ends_with(self, character: str) -> bool:
        """Take the next character; return whether it is the last."""
        if self._is_escaped:
            self._is_escaped = False
        elif character == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            self._is_escaped = character == "\\"
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
            return self.depth == 0
        return False


ANY = r"/(.|\n)*/"
# A model that does not know when to stop would go on to `max_tokens`.
MAX_CALLS = 8


def grammar_of(
    offer: Offer, spelling: Spelling, special: Mapping[str, int], answer: str | None
) -> Structure:
    """Return the form of answers whose calls are of the functions that were offered.

    An answer that must call begins with a call. One that may call is text up to a call, if any
    comes, and after the calls it ends. Arguments are valid under the schema of their function, and
    an answer that calls nothing under that of `answer`; None: any text. The texts in `special` are
    tokens of their own.
    """

    def spelled(text: str) -> str:
        """Return a text in Lark's notation; what is a special token, as that."""
        parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
        return " ".join(
            f"<[{special[part]}]>" if part in special else json.dumps(part)
            for part in parts
            if part
        )

    names = " | ".join(f"call_{i}" for i in range(len(offer.callable)))
    n_more = 0 if offer.is_single else MAX_CALLS - 1
    more = f"({spelled(spelling.between)} call){{0,{n_more}}}" if n_more else ""
    rules = [
        f"calls: {spelled(spelling.begin)} call {more} {spelled(spelling.end)}",
        f"call: {names}",
        *(
            f"call_{i}: {spelled(spelling.head.replace('{name}', function.name))}"
            f" {json_rule(function.schema)} {spelled(spelling.tail)}"
            for i, function in enumerate(offer.callable)
        ),
    ]
    if offer.must_call:
        rules.append(f"start: {spelled(spelling.marker)} calls")
    elif answer is not None:
        rules.append(f"start: answer | {spelled(spelling.marker)} calls")
        rules.append(f"answer: {json_rule(answer)}")
    else:
        rules += _after_text(spelling.marker, special, spelled)
    return Structure("grammar", "\n".join(rules))


def _after_text(
    marker: str, special: Mapping[str, int], spelled: Callable[[str], str]
) -> list[str]:
    """Return the rules of an answer that is text and perhaps calls after it."""
    if not marker:  # only the beginning tells
        return ["start: TEXT | calls | ", r"TEXT: /[^\[{](.|\n)*/"]
    if marker in special:  # which is no text
        return [f"start: TEXT | TEXT {spelled(marker)} calls", f"TEXT: {ANY}"]
    found = re.escape(marker)
    return [
        "start: TEXT | lead calls",
        f"lead[suffix={json.dumps(marker)}]: {ANY}",
        rf"TEXT: {ANY} & ~/(.|\n)*{found}(.|\n)*/",
    ]


@dataclass(frozen=True, eq=False)
class ToolUse:
    """How one model calls what a chat offers; `structure` is the form of its whole answer."""

    offer: Offer
    form: Format
    structure: Structure | None

    def reader(self, prompt: str) -> Reader:
        if self.structure is None or self.form.spelling is None:
            return CallReader(self.form, self.offer, prompt)
        return SpelledReader(self.form.spelling, self.offer)


def use_of(
    offer: Offer,
    form: Format,
    structures: Structures,
    answer: Structure | None,
    answer_field: str | None,
) -> ToolUse:
    """Return how a model calls what a chat offers; raises RequestError for what is not enforceable.

    `answer`, which `answer_field` gives, is the form of an answer that calls nothing; None: any.
    """
    if not offer.must_call and answer is not None and answer.form != "json_schema":
        raise RequestError(
            f"{answer_field} goes with tools only where it is JSON, or tool_choice asks for a call;"
            " leave one of them out",
            param=answer_field,
        )
    if not offer.is_enforced and answer is None:
        return ToolUse(offer, form, None)
    if answer is not None:
        try:
            structures.check(answer)
        except RequestError as error:
            error.param = answer_field
            raise
    if form.spelling is None and offer.must_call:
        form = FORMATS["json"]  # which nobody but the grammar has to know
    if form.spelling is None:
        raise RequestError(
            "this model's own form of calls cannot be enforced beside text; leave out strict and"
            " response_format, or ask for a call by tool_choice",
            param="tools",
        )
    schema, special = None if answer is None else answer.text, structures.special_tokens()
    return ToolUse(offer, form, grammar_of(offer, form.spelling, special, schema))
