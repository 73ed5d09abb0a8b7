"""Whether the first sentence of a reply gives an answer, wherever in the sentence that is.

    first sentence   up to its end or the end of its line, after pleasantries ("Sure!"); a line that
                     ends in a colon goes on in the next one
    given            an accepted answer occurs as whole words, more often than in the question that
                     the sentence may repeat
    unclear          it occurs, but is denied ("not Lima"), is one of several ("Cusco or Lima"), or
                     another answer is given, too

Words are normalised (juice.data.judging), without articles and a possessive's s. Where a script has
no spaces, each character is a word. What is not certain is unclear: a right answer may be missed
("It is not Cusco but Lima"), a wrong one should not pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal

from juice.data import passage
from juice.data.judging import normalise

Words = tuple[str, ...]
Verdict = Literal["given", "unclear", "absent"]

# Twice the longest of 480 sentences in which mini answers (23 tokens): room for a pleasantry.
MAX_SENTENCE_TOKENS = 48

PLEASANTRY = re.compile(
    r"(?:well|okay?|sure(?: thing)?|certainly|of course|absolutely|definitely|gladly|hello|hi)"
    r"(?: there)?"
    r"|(?:thats |that is |what )?(?:an? )?"
    r"(?:good|great|excellent|interesting|easy) (?:question|one)"
    r"|(?:im |id be |i would be )?(?:glad|happy) to (?:help|answer).*|i can help.*|thanks? .*"
)
CLAUSE_END = re.compile(r"(?<!\d),|,(?!\d)|[;:()\[\]—–]|\s-\s|\b(?:but|while|whereas)\b")
ARTICLES = {"a", "an", "the"}
# Said of what is before and after it in its clause, and of all that follows.
DENIALS = frozenset(
    re.split(
        " ",
        "not no never neither nor none cannot isnt arent wasnt werent dont doesnt didnt cant "
        "couldnt wont wouldnt hasnt havent unknown unsure incorrect incorrectly false falsely "
        "wrong wrongly mistakenly",
    )
)
# Said of what follows alone.
REFUSALS = {"rather", "instead", "unlike", "except", "contrary", "formerly"}
CHOICES = {"or", "either"}


def first_sentence(reply: str) -> str:
    """Return the first sentence of a reply that is more than a pleasantry."""
    line, _, rest = reply.strip().partition("\n")
    end = next((stop for _, stop in passage.sentences(line)), 0)
    sentence, rest = line[:end].strip(), f"{line[end:]}\n{rest}".strip()
    if rest and PLEASANTRY.fullmatch(normalise(sentence)):
        return first_sentence(rest)
    if rest and sentence.rstrip("*_ ").endswith(":"):
        return f"{sentence} {first_sentence(rest)}"
    return sentence


def verdict(
    sentence: str, accepted: Iterable[str], *, others: Iterable[str] = (), question: str = ""
) -> Verdict:
    """Return whether a sentence gives an accepted answer.

    Args:
        sentence: A sentence (`first_sentence`).
        accepted: The accepted answers.
        others: Answers that must not be given as well. Those that share their words with an
            accepted one, or that the question names, do not count.
        question: What was asked, whose words the sentence may repeat.
    """
    said, asked = _Sentence(sentence), _words(question)
    own = [words for words in map(_words, accepted) if words]
    found = [(words, said.places(words)[said.n_repeated(words, asked) :]) for words in own]
    if not any(places for _, places in found):
        return "absent"
    if not any(
        said.is_asserted(at, at + len(words), asked) for words, places in found for at in places
    ):
        return "unclear"
    rivals = [
        words
        for words in map(_words, others)
        if words
        and words[0] in said.words
        and not list(_places(asked, words))
        and not any(list(_places(a, b)) for one in own for a, b in ((one, words), (words, one)))
    ]
    is_shared = any(
        said.is_asserted(at, at + len(words), asked)
        for words in rivals
        for at in said.places(words)
    )
    return "unclear" if is_shared else "given"


def lead_to(sentence: str, answer: str, *, question: str = "") -> str | None:
    """Return what a sentence says before an answer that it gives; None where it is not found."""
    repeated = _Sentence(sentence).n_repeated(_words(answer), _words(question))
    spans = passage.find(sentence, [answer])[repeated:]
    before = sentence[: spans[0][0]].rstrip(" \t*_`\"'“‘«([") if spans else None
    return before if before is None or normalise(before) else ""


class _Sentence:
    """The words of a sentence, and the clause of each."""

    def __init__(self, sentence: str) -> None:
        clauses = [_words(clause) for clause in CLAUSE_END.split(sentence)]
        self.words = tuple(word for clause in clauses for word in clause)
        self.clauses = [i for i, clause in enumerate(clauses) for _ in clause]

    def places(self, words: Words) -> list[int]:
        """Return where words occur one after the other."""
        return list(_places(self.words, words))

    def n_repeated(self, words: Words, asked: Words) -> int:
        """Return how many times words may occur because the question has them.

        None in a reply such as "Luxembourg City" that begins with them and has one word more.
        """
        is_short = self.words[: len(words)] == words and len(self.words) <= len(words) + 1
        return 0 if is_short else len(list(_places(asked, words)))

    def is_asserted(self, start: int, stop: int, asked: Words) -> bool:
        """Return whether the words from start to stop are neither denied nor one of several."""
        before = set(self.words[:start]) - set(asked)
        clause = set(self.clauses[start:stop])
        own = [i for i, c in enumerate(self.clauses) if c in clause and not start <= i < stop]
        near = {self.words[i] for i in (*own, *range(max(0, start - 1), start))}
        near |= set(self.words[stop : stop + 1]) & CHOICES
        return not (before & (DENIALS | REFUSALS) or (near - set(asked)) & (DENIALS | CHOICES))


def _places(text: Words, words: Words) -> Iterator[int]:
    n = len(words)
    return (i for i in range(len(text) - n + 1) if n and text[i : i + n] == words)


@lru_cache(maxsize=100_000)  # each reply is compared with the answers to all questions
def _words(text: str) -> tuple[str, ...]:
    """Return the words of a text, normalised, without articles unless it has no others."""
    text = re.sub(r"(?<=\w)['’]s\b", "", text)
    text = re.sub(r"(?<=\d)\.(?=\d)", "point", text)
    text = re.sub(r"(?<!\w)-(?=\d)", "minus", text)
    text = re.sub(r"(?<=\w)[-‐‑–—/](?=\w)", " ", text)
    words = _apart(normalise(text)).split()
    return tuple(word for word in words if word not in ARTICLES) or tuple(words)


def _apart(text: str) -> str:
    """Put spaces around the characters of scripts that have no letters in two cases."""
    return "".join(c if c.lower() != c.upper() or not c.isalpha() else f" {c} " for c in text)
