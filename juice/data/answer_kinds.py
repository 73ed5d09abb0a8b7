"""What kind of answer an answer is, by its form: an answer is swapped for another of its kind.

date    a year, a decade, a month with a number, or numbers between dashes or slashes
number  digits, with a sign, a currency or a unit
name    every word capitalised, particles aside
other   anything else
"""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["date", "number", "name", "other"]

MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
DATE = re.compile(
    r"(1\d|20)\d\ds?|\d{1,4}"
    rf" ?(bc|ad|bce|ce)|\d{{1,4}}[-/]\d{{1,2}}[-/]\d{{1,4}}|(?=.*\d).*\b({MONTHS})\b.*|({MONTHS})",
    re.IGNORECASE,
)
NUMBER = re.compile(r"[-+~]?[$€£¥]? ?\d[\d.,]*( ?%| \w+)?")
PARTICLES = re.compile(
    r"a|al|an|and|at|da|de|del|der|des|di|du|el|for|in|la|le|of|on|the|to|van|von|y"
)


def kind_of(answer: str) -> Kind:
    """Return the kind of an answer."""
    if DATE.fullmatch(answer):
        return "date"
    if NUMBER.fullmatch(answer):
        return "number"
    words = [word.lstrip("\"'(“‘") for word in answer.split() if not PARTICLES.fullmatch(word)]
    return (
        "name"
        if words and all(word[:1].isupper() or word[:1].isdigit() for word in words)
        else "other"
    )
