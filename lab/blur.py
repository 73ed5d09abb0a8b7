"""Statements whose last words before the answer are any words at all, and sentences of such words.

A model that has seen only good English gives the answer after the words that it expects there, and
goes on with other words after an ending that it does not know. Blurred statements teach it that the
answer may come after anything. Contexts that go on in sentences without a meaning teach it to read
around words that it does not know.
"""

from __future__ import annotations

import re
from functools import cache
from random import Random

from lab.invention import word
from lab.relations import RELATIONS

INVENTED_SHARE, NAMING_SHARE = 0.3, 0.5


def blurred(wording: str, rng: Random) -> str:
    """Return a statement without its last words before the answer, or with any words there.

    One whose answer comes before its subject stays as it is.
    """
    before, _, after = wording.partition("{a}")
    if "{s}" not in before:
        return wording
    kept = before.split()
    n_free = len(kept) - 1 - _index_of_subject(kept)
    how = rng.choice(("cut", "replace", "insert") if n_free else ("insert",))
    if how != "insert":
        kept = kept[: len(kept) - rng.randint(1, min(3, n_free))]
    drawn = [] if how == "cut" else [_any_word(rng) for _ in range(rng.randint(1, 3))]
    return " ".join([*kept, *drawn, f"{{a}}{after}"])


def nonsense(rng: Random) -> str:
    """Return a sentence of any words; it may name a subject `{s}` and an answer `{a}`."""
    words = [_any_word(rng) for _ in range(rng.randint(5, 20))]
    for name in ("{s}", "{a}"):
        if rng.random() < NAMING_SHARE:
            words.insert(rng.randint(0, len(words)), name)
    if words[0] not in ("{s}", "{a}"):
        words[0] = words[0].capitalize()
    return " ".join(words) + "."


def _index_of_subject(words: list[str]) -> int:
    return next(i for i, one in enumerate(words) if "{s}" in one)


def _any_word(rng: Random) -> str:
    return word(rng).lower() if rng.random() < INVENTED_SHARE else rng.choice(_words())


@cache
def _words() -> list[str]:
    """Return all words of the wordings that training shows, sorted."""
    shown = " ".join(
        wording
        for relation in RELATIONS
        for wording in (*relation.statements, *relation.supports, *relation.fillers)
    )
    return sorted(set(re.findall(r"(?<![{'\w])[a-z]{2,}(?![}'\w])", shown)))
