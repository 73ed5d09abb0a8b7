"""The parts of a report: sections of sentences, tables and pictures, and the files they become.

A report is Markdown with picture files, and one HTML file that needs nothing else.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from juice.errors import OutputError
from juice.files import LOOK, write_lines

if TYPE_CHECKING:
    from pandas import DataFrame

Row = Sequence[str]
TEMPLATE = Path(__file__).parents[1] / "data" / "report.html"
DPI = 110


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


def write_report(folder: Path, made: Sequence[Section]) -> None:
    """Write report.md, report.html and the pictures.

    Raises OutputError where the folder cannot be written.
    """
    pictures = _pictures(made)
    try:
        (folder / "figures").mkdir(exist_ok=True)
        for name, content in pictures.items():
            (folder / "figures" / f"{name}.png").write_bytes(content)
    except OSError as error:
        raise OutputError(
            f"cannot write the pictures in {folder}: {error}; give another --out"
        ) from error
    write_lines(folder / "report.md", [_markdown(made)], overwrite=True)
    write_lines(folder / "report.html", [_html(made, pictures)], overwrite=True)


def page(made: Sequence[Section]) -> str:
    """Return one HTML file that needs nothing else."""
    return _html(made, _pictures(made))


def _pictures(made: Sequence[Section]) -> dict[str, bytes]:
    drawn = {}
    for picture in (picture for section in made for picture in section.pictures):
        content = io.BytesIO()
        # Without matplotlib's version, the same numbers give the same file.
        picture.draw().savefig(content, format="png", dpi=DPI, metadata={"Software": None})
        drawn[picture.name] = content.getvalue()
    return drawn


def _markdown(made: Sequence[Section]) -> str:
    lines: list[str] = []
    # Single answers are for the page, which can filter them.
    made = [section for section in made if not section.items]
    for i, section in enumerate(made):
        lines += [f"{'#' * (section.level if i else 1)} {section.title}", ""]
        if i == 0 and len(made) > 1:
            lines += [*_contents(made), ""]
        for sentence in section.text:
            lines += [sentence, ""]
        for table in section.tables:
            lines += [*_rows(table), ""]
        for picture in section.pictures:
            lines += [f"![{picture.caption}](figures/{picture.name}.png)", ""]
    return "\n".join(lines)


def _contents(made: Sequence[Section]) -> list[str]:
    """Return links to all sections but the first."""
    linked = list(zip(made, anchors(made), strict=True))[1:]
    return [f"{'  ' * (s.level - 2)}- [{s.title}](#{anchor})" for s, anchor in linked]


def _rows(table: Table) -> list[str]:
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    return [
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
        for row in rows
    ]


def _html(made: Sequence[Section], pictures: dict[str, bytes]) -> str:
    from jinja2 import Environment
    from markupsafe import Markup, escape

    def inline(text: str) -> Markup:
        """Render the little Markdown that sentences have: code and bold."""
        safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
        return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", safe))  # escaped above  # noqa: S704

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["inline"] = inline
    encoded = {name: base64.b64encode(content).decode() for name, content in pictures.items()}
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        sections=made,
        anchors=anchors(made),
        pictures=encoded,
        look=LOOK.read_text(encoding="utf-8"),
    )
