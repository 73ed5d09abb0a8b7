"""The parts of a report: sections of sentences, tables and pictures; and how numbers look."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

Row = Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table of texts; the first column names the row."""

    header: Row
    rows: Sequence[Row]

    @classmethod
    def of(cls, frame: DataFrame) -> Table:
        """Return a frame of texts, a row a method, as a table."""
        rows = [[words(name), *row] for name, *row in frame.itertuples(name=None)]
        return cls(["method", *map(words, frame.columns)], rows)

    @classmethod
    def by_column(cls, columns: Mapping[str, Iterable[str]]) -> Table:
        """Return the table of columns of texts, each under its title."""
        return cls([*columns], [*zip(*columns.values(), strict=True)])

    def as_text(self) -> str:
        """Return the table as lines with aligned columns."""
        every = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in every)
        return "\n".join(lines)


@dataclass(frozen=True)
class Picture:
    """A picture: its file's stem, what it shows, and how it is drawn."""

    name: str
    caption: str
    draw: Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One prompt of one fact, and the answers of every method.

    `other` is the answer that does not count, with whose it is; `answers` are (method, output,
    whether it is right, p of the parametric answer, p of the context answer).
    """

    subject: str
    relation: str
    conflict_type: str
    context: str
    question: str
    expected: str
    other: str
    answers: Sequence[tuple[str, str, bool, str, str]]


@dataclass(frozen=True)
class Section:
    """A title of level 2 or 3, sentences, tables, pictures and single answers.

    `in_terminal`: the command line shows its tables, too. Single answers are for the page alone.
    """

    title: str
    level: int = 2
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    in_terminal: bool = False
    items: Sequence[Item] = ()

    @property
    def methods(self) -> list[str]:
        """The methods of its single answers."""
        return list(dict.fromkeys(answer[0] for item in self.items for answer in item.answers))


def anchors(made: Sequence[Section]) -> list[str]:
    """Return the place of each section's title in a page, as GitHub names it: each its own."""
    seen, found = Counter[str](), []
    for section in made:
        anchor = re.sub(r"[^\w\- ]", "", section.title.lower()).replace(" ", "-")
        found.append(f"{anchor}-{seen[anchor]}" if anchor in seen else anchor)
        seen[anchor] += 1
    return found


def words(name: str) -> str:
    """Return a name as words: ph3 large for ph3_large."""
    return name.replace("_", " ")


def percent(value: float | None) -> str:
    """Return a share in percent with one decimal, as in the paper; a dash for none."""
    return number(None if value is None else 100 * value, 1)


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with `digits` decimals; a dash for None and for one that is not a number."""
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def between(low: float | None, high: float | None) -> str:
    """Return an interval of shares in percent; a dash where there is none."""
    return "–" if low is None or math.isnan(low) else f"{percent(low)}–{percent(high)}"


def head_name(head: Sequence[int]) -> str:
    """Return L3H5 for head 5 of layer 3."""
    return f"L{head[0]}H{head[1]}"
