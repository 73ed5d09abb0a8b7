"""Sections as Markdown with picture files, and as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from pathlib import Path

from juice.errors import OutputError
from juice.evaluation.report.parts import Section, Table, anchors
from juice.files import LOOK, write_lines

TEMPLATE = Path(__file__).parents[1] / "data" / "report.html"
DPI = 110


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
