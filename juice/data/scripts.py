"""Scripts that write words without spaces between them, and the edges of words in a text.

Chinese, Japanese, Thai, Lao, Khmer, Burmese and Tibetan have no spaces between words. Korean has,
but a particle follows its word without one.
"""

from __future__ import annotations

import re

# Ranges of characters, for a class of a regular expression.
SPACELESS = (
    "\u0e00-\u0fff"  # Thai, Lao, Tibetan
    "\u1000-\u109f"  # Burmese
    "\u1780-\u17ff"  # Khmer
    "\u2e80-\u2fdf\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    "\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff\uff66-\uff9f"  # kana, bopomofo
)
HANGUL = "\uac00-\ud7a3"
HAS_NO_SPACES, JOINS_THE_NEXT = re.compile(f"[{SPACELESS}]"), re.compile(f"[{SPACELESS}{HANGUL}]")


def is_spaceless(text: str) -> bool:
    """Return whether a text begins in a script that has no spaces between words."""
    return HAS_NO_SPACES.match(text) is not None


def joins_the_next(text: str) -> bool:
    """Return whether what follows a text may follow it without a space, as a word of its own."""
    return JOINS_THE_NEXT.match(text[-1:]) is not None


def apart(text: str) -> str:
    """Put spaces around each character that others may follow as a word of their own."""
    return JOINS_THE_NEXT.sub(r" \g<0> ", text)


def whole(words: str, pattern: str | None = None) -> str:
    """Return a regular expression for words that are not within a longer word.

    `pattern` is one that matches the words; None: the words themselves. In scripts without spaces
    these are found anywhere, since nothing shows where a word ends.
    """
    before = "" if is_spaceless(words) else rf"(?<![^\W{SPACELESS}])"
    after = "" if joins_the_next(words) else rf"(?![^\W{SPACELESS}{HANGUL}])"
    return f"{before}{re.escape(words) if pattern is None else pattern}{after}"
