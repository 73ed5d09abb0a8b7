"""What a report is made of: sections of sentences, tables and pictures, and how numbers look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table of texts; the first column names the row."""

    header: Row
    rows: Sequence[Row]


@dataclass(frozen=True)
class Picture:
    """A picture: its file's stem, what it shows, and how it is drawn."""

    name: str
    caption: str
    draw: Callable[[], Any]


@dataclass(frozen=True)
class Section:
    """A title of level 2 or 3, sentences, tables and pictures."""

    title: str
    level: int = 2
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = field(default_factory=tuple)


def words(name: str) -> str:
    """Return a name as words: ph3 large for ph3_large."""
    return name.replace("_", " ")


def percent(value: float | None) -> str:
    """Return a share in percent with one decimal, as in the paper; a dash for None."""
    return "–" if value is None else f"{100 * value:.1f}"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with `digits` decimals; a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"
