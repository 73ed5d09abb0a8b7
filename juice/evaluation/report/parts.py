"""What a report is made of: sections of sentences, tables and pictures, and how numbers look."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table of texts; the first column names the row."""

    header: Row
    rows: Sequence[Row]

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
    """One prompt of one fact, and what every method answered.

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

    @property
    def right(self) -> list[str]:
        """The methods that answered right."""
        return [answer[0] for answer in self.answers if answer[2]]

    @property
    def wrong(self) -> list[str]:
        """The methods that did not."""
        return [answer[0] for answer in self.answers if not answer[2]]


@dataclass(frozen=True)
class Section:
    """A title of level 2 or 3, sentences, tables, pictures and single answers.

    `in_terminal`: the command line shows its tables, too. Single answers are for the page alone.
    """

    title: str
    level: int = 2
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = field(default_factory=tuple)
    in_terminal: bool = False
    items: Sequence[Item] = ()

    @property
    def methods(self) -> list[str]:
        """The methods of its single answers."""
        return list(dict.fromkeys(answer[0] for item in self.items for answer in item.answers))

    @property
    def conflict_types(self) -> list[str]:
        """The conflict types of its single answers."""
        return list(dict.fromkeys(item.conflict_type for item in self.items))

    @property
    def relations(self) -> list[str]:
        """The relations of its single answers, sorted."""
        return sorted({item.relation for item in self.items if item.relation})


def anchors(made: Sequence[Section]) -> list[str]:
    """Return the place of each section's title in a page, as GitHub names it: each its own."""
    seen: dict[str, int] = {}
    found = []
    for section in made:
        anchor = re.sub(r"[^\w\- ]", "", section.title.lower()).replace(" ", "-")
        n = seen.get(anchor, 0)
        seen[anchor] = n + 1
        found.append(f"{anchor}-{n}" if n else anchor)
    return found


def words(name: str) -> str:
    """Return a name as words: ph3 large for ph3_large."""
    return name.replace("_", " ")


def percent(value: float | None) -> str:
    """Return a share in percent with one decimal, as in the paper; a dash for None."""
    return "–" if value is None else f"{100 * value:.1f}"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with `digits` decimals; a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"
