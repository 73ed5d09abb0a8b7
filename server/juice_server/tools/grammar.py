"""The grammar of answers that call functions, so that calls are those that were offered.

An answer that must call begins with a call. One that may call is text up to a call, if any comes,
and after the calls it ends. Arguments are valid under the schema of their function.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from juice.engine import Structure
from juice.engine.grammar import json_rule
from juice_server.tools.formats import Spelling
from juice_server.tools.offer import Offer

ANY = r"/(.|\n)*/"
# A model that does not know when to stop would go on to `max_tokens`.
MAX_CALLS = 8


def grammar_of(
    offer: Offer,
    spelling: Spelling,
    special: Mapping[str, int],
    answer: str | None = None,
) -> Structure:
    """Return the form of answers.

    Args:
        offer: What may be called.
        spelling: How calls are written.
        special: The texts that are tokens of their own.
        answer: The JSON schema of an answer that calls nothing; None: any text.
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
    between = f"({spelled(spelling.between)} call){{0,{MAX_CALLS - 1}}}"
    more = between if not offer.is_single else ""
    rules = [
        f"calls: {spelled(spelling.begin)} call {more} {spelled(spelling.end)}",
        f"call: {names}",
        *(
            f"call_{i}: {spelled(spelling.head.replace('{name}', own.name))}"
            f" {json_rule(own.schema)} {spelled(spelling.tail)}"
            for i, own in enumerate(offer.callable)
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
