"""A passage: finding answers in it, replacing them, and the sentences that hold them.

Answers are found as whole words, ignoring case unless they are in capitals, such as "US". A
sentence ends at a full stop, question mark or exclamation mark that is followed by a space but not
by a lower-case letter, and not after an initial or a title.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

Span = tuple[int, int]

END = re.compile(r"[.!?][\"'”’)\]]*\s++(?![a-z])|[。！？]")
NO_END = re.compile(
    r"(?:^|[\s(.])(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Mt|Jr|Sr|vs|Gen|Col|Lt|Capt|Rev|Hon|Sen|Rep|etc|approx|ca|ft)$"
)


def find(passage: str, answers: Iterable[str]) -> list[Span]:
    """Return the spans of the answers, the longest where several begin at one place."""
    longest_first = sorted(answers, key=len, reverse=True)
    alternatives = (re.escape(a) if a.isupper() else f"(?i:{re.escape(a)})" for a in longest_first)
    pattern = rf"(?<!\w)(?<!\d[.,])(?:{'|'.join(alternatives)})(?!\w)(?![.,]\d)"
    return [match.span() for match in re.finditer(pattern, passage)]


def replace(passage: str, spans: Iterable[Span], new: str) -> tuple[str, list[Span]]:
    """Return the passage with a new text at every span, and the spans of the new text."""
    pieces, placed, end, length = [], [], 0, 0
    for start, stop in spans:
        length += start - end
        placed.append((length, length + len(new)))
        pieces += [passage[end:start], new]
        length, end = length + len(new), stop
    return "".join([*pieces, passage[end:]]), placed


def sentences_with(passage: str, spans: Iterable[Span]) -> str:
    """Return the sentences of a passage that overlap the spans, in their order."""
    held = list(spans)
    chosen = [
        (a, b) for a, b in sentences(passage) if any(start < b and a < stop for start, stop in held)
    ]
    return " ".join(passage[a:b].strip() for a, b in chosen)


def sentences(passage: str) -> list[Span]:
    """Return the spans of a passage's sentences, each with the space after it."""
    ends = [m.end() for m in END.finditer(passage) if not NO_END.search(passage[: m.start()][-12:])]
    return [(a, b) for a, b in pairwise([0, *ends, len(passage)]) if a < b]


def swapped(text: str, new: Mapping[str, str]) -> str:
    """Return a text in which whole words, or runs of them, are replaced as `new` says."""
    longest_first = sorted(new, key=len, reverse=True)
    old = "|".join(rf"(?<!\w){re.escape(words)}(?!\w)" for words in longest_first)
    return re.sub(old, lambda match: new[match.group()], text)
