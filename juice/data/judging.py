"""The rules by which an output is the answer: those of the paper and of MemoTrap.

    normalise(text)  lower case, accents and punctuation stripped, white space folded
    contains         an accepted answer is contained in the first words of the output: five
                     (ParaConflict), or as many as the data set says (NQ-Swap: 20); an answer of
                     more words begins there
    begins           the first n words of the output are an accepted answer of n words
    exact            the first line of the output is an accepted answer, articles aside

All rules compare normalised texts. An answer that normalises to nothing never matches.

Each answer also has a kind by its form, since it is swapped for another of its kind (`kind_of`):

    date    a year, a decade, a month with a number, or numbers between dashes or slashes
    number  digits, with a sign, a currency or a unit
    name    every word capitalised, particles aside
    other   anything else
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Literal

N_WORDS = 5
MAX_TOKENS = 15


def normalise(text: str) -> str:
    """Lower-case, strip accents and punctuation, fold white space.

    Marks that make another letter stay, such as vowel signs, tone marks and the voicing of kana.
    """
    # Mathematical letter forms are capital letters only once they are decomposed.
    lowered = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).lower())
    kept = (c for c in lowered if not unicodedata.category(c).startswith("P") and not _is_accent(c))
    return unicodedata.normalize("NFC", " ".join("".join(kept).split()))


def _is_accent(c: str) -> bool:
    """Return whether a character is a mark that may be left out, of no letter's own."""
    category, place = unicodedata.category(c), unicodedata.combining(c)
    if not category.startswith("M"):
        return False
    # Classes of Unicode: overlays, Hebrew and Arabic points, and accents of any script.
    is_optional = place == 1 or 10 <= place <= 36 or place >= 200
    return is_optional or category == "Me" or "VARIATION SELECTOR" in unicodedata.name(c, "")


def contains_answer(output: str, accepted: Iterable[str], n_words: int = N_WORDS) -> bool:
    """Return whether an accepted answer is contained in the first words of the output.

    An answer of more than `n_words` words begins there.
    """
    words = output.split()

    def head(answer: str) -> str:
        longer = len(answer.split())
        return normalise(" ".join(words[: n_words if longer <= n_words else n_words - 1 + longer]))

    return any(answer in head(answer) for answer in map(normalise, accepted) if answer)


def begins_with_answer(output: str, accepted: Iterable[str]) -> bool:
    """Return whether the output begins with an accepted answer, word for word."""
    words = normalise(output).split()
    answers = [normalise(text).split() for text in accepted]
    return any(words[: len(answer)] == answer for answer in answers if answer)


def is_whole_answer(output: str, accepted: Iterable[str]) -> bool:
    """Return whether the output's first line is an accepted answer, articles aside."""
    line = _without_articles(output.strip().partition("\n")[0])
    return any(line == answer for answer in map(_without_articles, accepted) if answer)


def _without_articles(text: str) -> str:
    return " ".join(word for word in normalise(text).split() if word not in ("a", "an", "the"))


def is_among(answer: str, accepted: Iterable[str]) -> bool:
    """Return whether an answer is one of those accepted, both normalised."""
    return normalise(answer) in set(map(normalise, accepted))


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


def kind_of(answer: str) -> Literal["date", "number", "name", "other"]:
    """Return the kind of an answer by its form."""
    if DATE.fullmatch(answer):
        return "date"
    if NUMBER.fullmatch(answer):
        return "number"
    words = [word.lstrip("\"'(“‘") for word in answer.split() if not PARTICLES.fullmatch(word)]
    is_name = words and all(word[:1].isupper() or word[:1].isdigit() for word in words)
    return "name" if is_name else "other"
