"""A passage: where answers stand in it, the same passage with another answer, and its sentences.

Answers are found as whole words, in any case; those in capitals, such as "US", as they are written.
A sentence ends at a full stop, a question or an exclamation mark before a space and no lower-case
letter, but not after an initial or a title.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

Span = tuple[int, int]

END = re.compile(r"[.!?][\"'”’)\]]*\s++(?![a-z])")
NO_END = re.compile(
    r"(?:^|[\s(.])(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Mt|Jr|Sr|vs|Gen|Col|Lt|Capt|Rev|Hon|Sen|Rep|etc|approx|ca|ft)$"
)


def find(passage: str, answers: Iterable[str]) -> list[Span]:
    """Return where any of the answers stands, the longest where several do."""
    longest_first = sorted(answers, key=len, reverse=True)
    alternatives = (re.escape(a) if a.isupper() else f"(?i:{re.escape(a)})" for a in longest_first)
    pattern = rf"(?<!\w)(?<!\d[.,])(?:{'|'.join(alternatives)})(?!\w)(?![.,]\d)"
    return [match.span() for match in re.finditer(pattern, passage)]


def replace(passage: str, spans: Iterable[Span], new: str) -> tuple[str, list[Span]]:
    """Return the passage with a new text at every span, and where it stands now."""
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
    ends = [m.end() for m in END.finditer(passage) if not NO_END.search(passage[: m.start()][-12:])]
    bounds = [0, *ends, len(passage)]
    chosen = [
        (a, b) for a, b in pairwise(bounds) if any(start < b and a < stop for start, stop in held)
    ]
    return " ".join(passage[a:b].strip() for a, b in chosen)
