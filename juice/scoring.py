"""Is this output the answer? The paper's normalisation and rule (ParaConflict).

    normalise(text)  lower case, accents and punctuation stripped, white space folded
    correct          some accepted answer, normalised, is contained in the first five words of the output, normalised

An answer that normalises to nothing never matches. This module knows nothing of models.
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
    kept = (c for c in unicodedata.normalize("NFKD", lowered) if not unicodedata.category(c).startswith(("M", "P")))
    return " ".join("".join(kept).split())


def contains_answer(output: str, accepted: Iterable[str], n_words: int = N_WORDS) -> bool:
    """Tell whether an accepted answer is contained in the first n words of the output."""
    head = normalise(" ".join(output.split()[:n_words]))
    return any(answer in head for answer in map(normalise, accepted) if answer)
