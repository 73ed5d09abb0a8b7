"""Whether an output is the answer: the rules of the paper and of MemoTrap.

    normalise(text)  lower case, accents and punctuation stripped, white space folded
    contains         an accepted answer is contained in the first words of the output: five
                     (ParaConflict), or as many as the data set says (NQ-Swap: 20)
    begins           the first n words of the output are an accepted answer of n words

Both rules compare normalised texts. An answer that normalises to nothing never matches.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

N_WORDS = 5
MAX_TOKENS = 15


def normalise(text: str) -> str:
    """Lower-case, strip accents and punctuation, fold white space."""
    # Mathematical letter forms are capital letters only once they are decomposed.
    lowered = unicodedata.normalize("NFKD", text).lower()
    kept = (
        c
        for c in unicodedata.normalize("NFKD", lowered)
        if not unicodedata.category(c).startswith(("M", "P"))
    )
    return " ".join("".join(kept).split())


def contains_answer(output: str, accepted: Iterable[str], n_words: int = N_WORDS) -> bool:
    """Return whether an accepted answer is contained in the first words of the output."""
    head = normalise(" ".join(output.split()[:n_words]))
    return any(answer in head for answer in map(normalise, accepted) if answer)


def begins_with_answer(output: str, accepted: Iterable[str]) -> bool:
    """Return whether the output begins with an accepted answer, word for word."""
    words = normalise(output).split()
    return any(
        words[: len(answer)] == answer
        for answer in (normalise(text).split() for text in accepted)
        if answer
    )


def is_among(answer: str, accepted: Iterable[str]) -> bool:
    """Return whether an answer is one of those accepted, both normalised."""
    return normalise(answer) in set(map(normalise, accepted))
