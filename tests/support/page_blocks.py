"""The fenced blocks of the pages, with what a page shows below them and what it says of them.

A comment that readers do not see may stand on the line before a block:

    <!-- not run: REASON -->                  it cannot be run here, or is nothing to run
    <!-- run by tests/FILE.py[::TEST] -->     another test reads it from the page and runs it
    <!-- file: NAME -->                       it is saved under that name, as the page asks

`run by` on the first line of a page is for all its blocks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("head_sets/*.md")]),
    ROOT / "juice" / "models" / "mini" / "README.md",
]
PAGES = [page for page in PAGES if "results" not in page.parts]  # reports are written by juice
RUNS = {"sh", "console", "python", "js", "json", "toml", "yaml"}
PLAIN = {"", "text"}  # what the block above it printed; anything else needs a comment
COMMENT = re.compile(r"<!-- (not run|run by|file):? (.+?) -->", re.DOTALL)
FENCE = re.compile(r"(?ms)^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$")


@dataclass(frozen=True)
class Block:
    """One block; `output` is the plain block right below it."""

    page: Path
    line: int
    language: str
    text: str
    says: tuple[str, str] | None
    output: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def is_said(self, kind: str) -> bool:
        """Return whether the comment before the block is of this kind."""
        return self.says is not None and self.says[0] == kind


def blocks(page: Path) -> list[Block]:
    """Return all blocks of a page."""
    text = page.read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    return [
        Block(
            page=page,
            line=text.count("\n", 0, fence.start()) + 1,
            language=fence["language"],
            text=fence["text"],
            says=_comment(text, fence.start()),
            output=_output(text, fence, following),
        )
        for fence, following in zip_longest(fences, fences[1:])
    ]


def run_by(page: Path, file: str) -> list[Block]:
    """Return the blocks of a page that a test file runs, as the page says; there are some."""
    found = [
        block
        for block in blocks(page)
        if block.is_said("run by") and block.says[1].startswith(file)
    ]
    assert found, f"{page.name}: no block is said to be run by {file}"
    return found


def _comment(text: str, start: int) -> tuple[str, str] | None:
    """Return the kind and the words of the comment right before a place, else of the page."""
    before = [each for each in COMMENT.finditer(text, 0, start) if text[each.end() : start] == "\n"]
    comment = before[-1] if before else COMMENT.match(text)
    return (comment[1], " ".join(comment[2].split())) if comment else None


def _output(text: str, fence: re.Match[str], following: re.Match[str] | None) -> str | None:
    """Return the next block, if it is a plain one and nothing stands between."""
    if following is None or following["language"] not in PLAIN:
        return None
    return None if text[fence.end() : following.start()].strip() else following["text"]


def commands(text: str, *, prompt: str = "") -> Iterator[tuple[str, str]]:
    """Yield the commands of a block, each with the output shown below it.

    With a prompt, a command begins after it; without one, every line that does not go on the one
    before is a command. A command goes on over line ends in quotes and after a backslash.
    """
    lines = text.splitlines(keepends=True)
    while lines:
        line = lines.pop(0)
        if not line.startswith(prompt) or not line.strip():
            continue
        command = line.removeprefix(prompt)
        while lines and not _is_whole(command):
            command += lines.pop(0)
        output = ""
        while prompt and lines and not lines[0].startswith(prompt):
            output += lines.pop(0)
        yield command.replace("\\\n", "").strip(), output


def _is_whole(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return not command.endswith("\\\n")


# What differs from run to run or between machines: ids, durations, rounding errors, late digits.
VARYING = (
    (r"[a-z]+-[0-9a-f]{32}", "ID"),
    (r'_s":[\d.]+', '_s":0'),
    (r"\d(\.\d+)?e-0[5-9]", "TINY"),
    (r"(?<=\d\.\d\d)\d{3,}", ""),
)


def agree(shown: str, printed: str) -> bool:
    """Return whether what a page shows was printed; `...` stands for anything.

    White space does not count, as pages wrap long lines.
    """
    squeezed = [re.sub(r"\s+", "", text) for text in (shown, printed)]
    for pattern, instead in VARYING:
        squeezed = [re.sub(pattern, instead, text) for text in squeezed]
    return re.fullmatch(re.escape(squeezed[0]).replace(r"\.\.\.", ".*"), squeezed[1]) is not None
