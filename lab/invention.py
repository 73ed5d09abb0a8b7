"""Invented names: subjects and answers of no facts file, so that only a context tells them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

_ONSETS = tuple(
    "b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t th tr v vr w z zh".split()  # noqa: SIM905
)
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ie", "oo", "ou")
_CODAS = ("", "", "", "n", "r", "l", "s", "m", "th", "rk", "nd", "x")
_NOUNS = tuple(
    "River Winter Garden Lantern Orchard Harbour Mirror Clock Silence Bridge Letter Island".split()  # noqa: SIM905
)


def word(rng: Random, syllables: int = 2) -> str:
    """Return a word that sounds as if it were one, its first letter a capital."""
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables)]
    return ("".join(parts) + rng.choice(_CODAS)).capitalize()


def place(rng: Random) -> str:
    """Return the name of a country."""
    stem = word(rng, rng.choice((2, 2, 3)))
    return rng.choice(
        (stem, stem, stem + "ia", stem + "land", f"New {stem}", f"the {stem} Islands")
    )


def city(rng: Random) -> str:
    """Return the name of a city."""
    stem = word(rng, rng.choice((1, 2, 2)))
    return rng.choice((stem, stem, stem + "ville", stem + " City", f"Port {stem}"))


def person(rng: Random) -> str:
    """Return a first and a last name."""
    return f"{word(rng)} {word(rng, rng.choice((1, 2)))}"


def language(rng: Random) -> str:
    """Return the name of a language."""
    return word(rng, rng.choice((1, 2))) + rng.choice(("ish", "ese", "ian", "i"))


def sport(rng: Random) -> str:
    """Return the name of a sport, in lower case."""
    return (word(rng, rng.choice((1, 2))) + rng.choice(("ball", "ing", "o", ""))).lower()


def title(rng: Random) -> str:
    """Return the title of a book."""
    noun, stem = rng.choice(_NOUNS), word(rng)
    return rng.choice(
        (
            f"The {noun} of {stem}",
            f"{stem} and the {noun}",
            f"A {noun} for {stem}",
            f"The Last {noun}s of {stem}",
        )
    )


def company(rng: Random) -> str:
    """Return the name of a company."""
    stem = word(rng, rng.choice((2, 2, 3)))
    return rng.choice(
        (stem, stem, f"{stem} Systems", f"{stem} Foods", f"{stem} Group", f"{stem} Motors")
    )


def place_like(names: Sequence[str], rng: Random) -> str:
    """Return the name of a country that resembles a known one."""
    side = rng.choice(("New", "North", "South", "East", "West", "Upper", "Lower", "Greater"))
    return f"{side} {rng.choice(names).removeprefix('the ')}"


def person_like(names: Sequence[str], rng: Random) -> str:
    """Return the first name of one person with the last name of another."""
    return f"{rng.choice(names).split()[0]} {rng.choice(names).split()[-1]}"


def title_like(names: Sequence[str], rng: Random) -> str:
    """Return the beginning of one title with the end of another."""
    first, last = rng.choice(names).split(), rng.choice(names).split()
    return " ".join(first[: (len(first) + 1) // 2] + last[len(last) // 2 :])


def company_like(names: Sequence[str], rng: Random) -> str:
    """Return the name of a company that resembles a known one."""
    kind = rng.choice(("Systems", "Foods", "Group", "Motors", "Airlines", "Bank", "Media"))
    return f"{rng.choice(names).split()[0]} {kind}"


Inventor = Callable[[Random], str]
Imitator = Callable[[Sequence[str], Random], str]

# By relation: how to invent a subject, a subject that resembles known ones, and an answer.
INVENTORS: dict[str, tuple[Inventor, Imitator, Inventor]] = {
    "world_capital": (place, place_like, city),
    "official_language": (place, place_like, language),
    "athlete_sport": (person, person_like, sport),
    "book_author": (title, title_like, person),
    "company_founder": (company, company_like, person),
    "company_headquarter": (company, company_like, city),
}
