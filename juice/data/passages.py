"""Answers in passages and in replies: where they are, and if a sentence gives them.

In a passage answers are found as whole words, where their script parts words, ignoring case unless
they are in capitals, such as "US". Chinese, Japanese, Thai, Lao, Khmer, Burmese and Tibetan have no
spaces between words; Korean has, but a particle follows its word without one. A sentence ends at a
full stop, question mark or exclamation mark that is followed by a space but not by a lower-case
letter, and not after an initial or a title.

The first sentence of a reply is judged wherever in it the answer is (`verdict`):

    first sentence   up to its end or the end of its line, after pleasantries ("Sure!"); a line that
                     ends in a colon goes on in the next one
    given            an accepted answer occurs as whole words, more often than in the question that
                     the sentence may repeat
    unclear          it occurs, but is denied ("not Lima"), is one of several ("Cusco or Lima"), or
                     another answer is given, too

Words are normalised (juice.data.judging), without articles and a possessive's s. Where words may
follow each other without a space, each character is a word. What is not certain is unclear: a right
answer may be missed ("It is not Cusco but Lima"), a wrong one should not pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from juice.data.judging import normalise

Span = tuple[int, int]
Words = tuple[str, ...]
Verdict = Literal["given", "unclear", "absent"]

END = re.compile(r"[.!?][\"'”’)\]]*\s++(?![a-z])|[。！？]")
NO_END = re.compile(
    r"(?:^|[\s(.])(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Mt|Jr|Sr|vs|Gen|Col|Lt|Capt|Rev|Hon|Sen|Rep|etc|approx|ca|ft)$"
)

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
DENIALS = set(
    "not no never neither nor none cannot isnt arent wasnt werent dont doesnt didnt cant couldnt "  # noqa: SIM905
    "wont wouldnt hasnt havent unknown unsure incorrect incorrectly false falsely wrong wrongly "
    "mistakenly".split()
)
# Said of what follows alone.
REFUSALS = {"rather", "instead", "unlike", "except", "contrary", "formerly"}
CHOICES = {"or", "either"}
# Ranges of characters, for a class of a regular expression.
SPACELESS = (
    "\u0e00-\u0fff"  # Thai, Lao, Tibetan
    "\u1000-\u109f"  # Burmese
    "\u1780-\u17ff"  # Khmer
    "\u2e80-\u2fdf\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    "\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff\uff66-\uff9f"  # kana, bopomofo
)
HANGUL = "\uac00-\ud7a3"
# A title may begin with its mark.
HAS_NO_SPACES = re.compile(rf"[^\w\s]*[{SPACELESS}]")
JOINS_THE_NEXT = re.compile(f"[{SPACELESS}{HANGUL}]")


def is_spaceless(text: str) -> bool:
    """Return whether a text begins in a script that has no spaces between words."""
    return HAS_NO_SPACES.match(text) is not None


def glue_between(text: str, answer: str) -> str:
    """Return a space, or nothing where the text ends in one or the answer's script has none."""
    return "" if text[-1:].isspace() or is_spaceless(answer) else " "


def followed(text: str, answer: str) -> str:
    """Return an answer that follows a text, which may be empty."""
    return f"{text}{glue_between(text, answer)}{answer}" if text else answer


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


def find(passage: str, answers: Iterable[str]) -> list[Span]:
    """Return the spans of the answers, the longest where several begin at one place."""
    longest_first = sorted(answers, key=len, reverse=True)
    alternatives = (
        whole(a, None if a.isupper() else f"(?i:{re.escape(a)})") for a in longest_first
    )
    pattern = rf"(?<!\d[.,])(?:{'|'.join(alternatives)})(?![.,]\d)"
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


def sentences_with(passage: str, spans: Sequence[Span]) -> str:
    """Return the sentences of a passage that overlap the spans, in their order."""
    return " ".join(
        passage[a:b].strip()
        for a, b in sentences(passage)
        if any(start < b and a < stop for start, stop in spans)
    )


def sentences(passage: str) -> list[Span]:
    """Return the spans of a passage's sentences, each with the space after it."""
    ends = [m.end() for m in END.finditer(passage) if not NO_END.search(passage[: m.start()][-12:])]
    return [(a, b) for a, b in pairwise([0, *ends, len(passage)]) if a < b]


def swapped(text: str, new: Mapping[str, str]) -> str:
    """Return a text with whole words, or runs of them, replaced by those of `new`."""
    longest_first = sorted(new, key=len, reverse=True)
    old = "|".join(map(whole, longest_first))
    return re.sub(old, lambda match: new[match.group()], text)


def first_sentence(reply: str) -> str:
    """Return the first sentence of a reply that is more than a pleasantry."""
    line, _, rest = reply.strip().partition("\n")
    end = next((stop for _, stop in sentences(line)), 0)
    sentence, rest = line[:end].strip(), f"{line[end:]}\n{rest}".strip()
    if rest and PLEASANTRY.fullmatch(normalise(sentence)):
        return first_sentence(rest)
    if rest and sentence.rstrip("*_ ").endswith(":"):
        return f"{sentence} {first_sentence(rest)}"
    return sentence


def verdict(
    sentence: str, accepted: Iterable[str], *, others: Iterable[str] = (), question: str = ""
) -> Verdict:
    """Return the verdict on a sentence: an accepted answer is given, unclear or absent.

    The sentence may repeat the words of the question. The others must not be given as well, unless
    they share their words with an accepted answer, or the question names them.
    """
    said, asked = _Sentence(sentence), _words(question)
    right = [words for words in map(_words, accepted) if words]
    found = [
        (words, _places(said.words, words)[said.n_repeated(words, asked) :]) for words in right
    ]
    if not any(places for _, places in found):
        return "absent"
    if not any(said.asserts(words, places, asked) for words, places in found):
        return "unclear"
    rivals = (
        words
        for words in map(_words, others)
        if words
        and words[0] in said.words
        and not _places(asked, words)
        and not any(_places(one, words) or _places(words, one) for one in right)
    )
    is_shared = any(said.asserts(words, _places(said.words, words), asked) for words in rivals)
    return "unclear" if is_shared else "given"


def lead_to(sentence: str, answer: str, *, question: str = "") -> str | None:
    """Return the words of a sentence before an answer that it gives; None where it is not found."""
    repeated = _Sentence(sentence).n_repeated(_words(answer), _words(question))
    spans = find(sentence, [answer])[repeated:]
    before = sentence[: spans[0][0]].rstrip(" \t*_`\"'“‘«([") if spans else None
    return before if before is None or normalise(before) else ""


class _Sentence:
    """The words of a sentence, and the clause of each."""

    def __init__(self, sentence: str) -> None:
        clauses = [_words(clause) for clause in CLAUSE_END.split(sentence)]
        self.words = tuple(word for clause in clauses for word in clause)
        self.clauses = [i for i, clause in enumerate(clauses) for _ in clause]

    def n_repeated(self, words: Words, asked: Words) -> int:
        """Return the number of times that words may occur because the question has them.

        It is 0 for a reply such as "Luxembourg City" that begins with them and has one word more.
        """
        is_short = self.words[: len(words)] == words and len(self.words) <= len(words) + 1
        return 0 if is_short else len(_places(asked, words))

    def asserts(self, words: Words, places: Iterable[int], asked: Words) -> bool:
        """Return whether words at one of the places are neither denied nor one of several."""
        return any(self._is_asserted(at, at + len(words), asked) for at in places)

    def _is_asserted(self, start: int, stop: int, asked: Words) -> bool:
        before = set(self.words[:start]) - set(asked)
        clauses = set(self.clauses[start:stop])
        near = {
            word
            for i, (word, clause) in enumerate(zip(self.words, self.clauses, strict=True))
            if (clause in clauses and not start <= i < stop) or i == start - 1
        }
        near |= set(self.words[stop : stop + 1]) & CHOICES
        return not (before & (DENIALS | REFUSALS) or (near - set(asked)) & (DENIALS | CHOICES))


def _places(text: Words, words: Words) -> list[int]:
    """Return the places in a text at which words begin that occur one after the other."""
    n = len(words)
    return [i for i in range(len(text) - n + 1) if n and text[i : i + n] == words]


@lru_cache(maxsize=100_000)  # each reply is compared with the answers to all questions
def _words(text: str) -> Words:
    """Return the words of a text, normalised, without articles unless it has no others."""
    text = re.sub(r"(?<=\w)['’]s\b", "", text)
    text = re.sub(r"(?<=\d)\.(?=\d)", "point", text)
    text = re.sub(r"(?<!\w)-(?=\d)", "minus", text)
    text = re.sub(r"(?<=\w)[-‐‑–—/](?=\w)", " ", text)
    words = apart(normalise(text)).split()
    return tuple(word for word in words if word not in ARTICLES) or tuple(words)
