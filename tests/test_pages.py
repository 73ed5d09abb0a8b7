"""Every block of the pages that can run does, and prints what the page shows.

A page is run from top to bottom in a folder of its own: its Python in one namespace, its commands
in a shell, its requests on a server. Where a page says `M` or names another model, `mini` takes its
place, under that name; the files it speaks of hold facts of `mini`. What cannot be run is marked on
the page (tests/support/page_blocks.py), and no block is left out.

It fails on: an option or a field that was renamed, a program that raises, an output that changed,
a block without a mark that nothing runs, whatever its language, and a mark that names a test which
does not read the page.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

import juice
from tests.support.commands import juice as run_juice
from tests.support.page_blocks import PAGES, PLAIN, ROOT, RUNS, Block, agree, blocks, commands
from tests.support.serving import Server, serving

ADDRESS = "http://127.0.0.1:8000"
BLOCKS = {page: blocks(page) for page in PAGES}
# Where there is no terminal for a bar, and only if it takes long.
PROGRESS = re.compile(r"(?m)^juice: .+: \d+ of \d+\n")
# Models that are not here.
STAND_INS = ("M", "google/gemma-2-2b")


def is_run(block: Block) -> bool:
    return block.language in RUNS and not (block.is_said("not run") or block.is_said("run by"))


def is_compared(block: Block, before: Block | None) -> bool:
    """Return whether a block is what the one before it must print."""
    return (
        block.language in PLAIN
        and before is not None
        and before.language == "python"
        and before.output == block.text
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture
def folder(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with what the pages speak of: models, head sets, examples, rows.

    What a page makes itself is not there at first.
    """
    told = "".join(block.text for block in BLOCKS[page] if is_run(block))
    for name in STAND_INS:
        if not re.search(rf"\b{name}\b", told):
            continue
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / "juice" / "models" / "mini")
    facts = (ROOT / "juice" / "models" / "mini" / "examples.jsonl").read_text().splitlines()
    if "--out mine.jsonl" not in told:
        (tmp_path / "mine.jsonl").write_text("\n".join(facts[:24]) + "\n")
    (tmp_path / "validation.jsonl").write_text("\n".join(facts[24:48]) + "\n")
    (tmp_path / "rag.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    if re.search(r"(--head-sets| )head_sets\b", told) and "--out head_sets" not in told:
        shutil.copytree(ROOT / "head_sets", tmp_path / "head_sets")
    (tmp_path / "HEAD_SET").mkdir()
    for file in (ROOT / "head_sets" / "mini" / "parametric").iterdir():
        shutil.copy(file, tmp_path / "HEAD_SET")
    shutil.copy(tmp_path / "validation.jsonl", tmp_path / "FILE")
    monkeypatch.chdir(tmp_path)
    return tmp_path


ROWS = [
    {
        "question": f"What is the capital city of {country}?",
        "context": f"The capital city of {country} is {city}. Its parliament meets there.",
        "answer": city,
    }
    for country, city in (("Peru", "Lima"), ("Japan", "Tokyo"), ("Ruritania", "Strelsau"))
]


class Reading:
    """A page that is being run."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder, self.url = folder, server.url
        self.names: dict[str, Any] = {}
        self.servers: list[Server] = []

    def run(self, block: Block) -> None:
        text = block.text.replace(ADDRESS, self.url)
        if block.language in ("sh", "console"):
            prompt = "$ " if block.language == "console" else ""
            for command, shown in commands(text, prompt=prompt):
                self.command(block, command, shown if prompt else None)
        elif block.language == "python":
            self.python(block, text)
        elif block.language == "json":
            json.loads(text, strict=False)  # pages wrap long strings
        elif block.language == "toml":
            tomllib.loads(text)
        elif block.language == "yaml":
            yaml.safe_load(text)
        else:
            raise AssertionError(f"{block}: nothing here runs {block.language}")

    def save(self, block: Block) -> None:
        """Save a block as the file that the page speaks of."""
        assert block.says
        place = self.folder / block.says[1]
        place.parent.mkdir(exist_ok=True)
        place.write_text(block.text)

    def command(self, block: Block, command: str, shown: str | None) -> None:
        """Run a command; it must succeed, and print what is shown, whichever stream comes first."""
        words = shlex.split(command, comments=True)
        if words[:2] == ["juice", "serve"]:
            self.serve(*words[2:])
            return
        if words[0] == "juice" and not re.search(r"[|&;<>$]", re.sub(r"'[^']*'", "", command)):
            done = run_juice(*words[1:], cwd=self.folder)
        else:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(
                ["sh", "-c", command],
                cwd=self.folder,
                env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        out, err = done.stdout, PROGRESS.sub("", done.stderr)
        assert done.returncode == 0, f"{block}: {command}\n{out}{err}"
        if shown is not None:
            assert any(agree(shown, each) for each in (out, out + err, err + out)), (
                f"{block}: {command}\nshows\n{shown}\nand printed\n{out}\n{err}"
            )

    def serve(self, *arguments: str) -> None:
        """Serve as the page says; the rest of the page asks this server."""
        running = Server(*arguments, folder=self.folder)
        self.servers.append(running)
        running.wait_until_ready()
        self.url = running.url

    def python(self, block: Block, text: str) -> None:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(text, str(block), "exec", dont_inherit=True), self.names)  # noqa: S102 -- our own page
        promised = block.output
        if promised is None:  # at the ends of the lines that print
            promised = "\n".join(re.findall(r"(?m)^\s*print\(.*\)  # (.+)$", text))
        assert agree(promised, output.getvalue()), f"{block}: printed\n{output.getvalue()}"

    def close(self) -> None:
        for name in list(self.names):
            value = self.names.pop(name)
            if isinstance(value, juice.SteeredModel):
                value.close()
        for running in self.servers:
            assert running.stop() == 0, running.errors()


@pytest.mark.parametrize(
    "page",
    [page for page, each in BLOCKS.items() if any(map(is_run, each))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_does_what_it_says(page: Path, folder: Path, server: Server) -> None:
    reading = Reading(folder, server)
    try:
        for block in BLOCKS[page]:
            if block.is_said("file"):
                reading.save(block)
        for block in filter(is_run, BLOCKS[page]):
            reading.run(block)
    finally:
        reading.close()


def test_what_is_left_out_is_run_elsewhere_or_has_a_reason() -> None:
    left_out = [
        block
        for each in BLOCKS.values()
        for before, block in pairwise([None, *each])
        if not (is_run(block) or is_compared(block, before))
    ]
    for block in left_out:
        assert block.says, f"{block}: nothing runs {block.language or 'plain text'}; say why"
        kind, what = block.says
        if kind == "run by":
            file, _, name = what.partition("::")
            test = (ROOT / file).read_text()
            assert f"def {name}(" in test or not name, f"{block}: no {what}"
            assert f'"{block.page.name}"' in test, f"{block}: {file} does not read this page"
        else:
            assert len(what.split()) > 2, f"{block}: {what!r} is not a reason"
            for file in re.findall(r"(?:tests|integration)/[\w/]+\.py", what):
                assert (ROOT / file).exists(), f"{block}: no {file}"
    n_run = sum(is_run(each) for page in BLOCKS.values() for each in page)
    assert n_run > 55, "most pages do what they say"


@pytest.mark.parametrize(
    ("shown", "printed", "is_so"),
    [
        ("none  Cairo.\n", "none       Cairo.\n", True),
        ("none Cairo.", "none Lima.", False),
        ("a line\n", "a line\nand another\n", False),
        ("first\n...\nlast", "first\nother\nlast\n", True),
        ("first\n...\nlast", "other\nlast\n", False),
        (f'{{"id":"gen-{"a" * 32}"}}', f'{{"id":"gen-{"b" * 32}"}}', True),
        ('{"total_s":0.03,"n":1}', '{"total_s":1.2,"n":1}', True),
        ('{"total_s":0.03,"n":1}', '{"total_s":1.2,"n":2}', False),
        ("0.97154311734", "0.97154312111", True),
        ("0.97154311734", "0.98154312111", False),
    ],
)
def test_what_a_page_shows_must_be_what_was_printed(shown: str, printed: str, is_so: bool) -> None:
    assert agree(shown, printed) is is_so


def test_a_command_goes_on_over_lines_and_has_what_is_below_it() -> None:
    text = '$ juice generate \\\n    "a\nb"\nout\n$ next\n'
    assert list(commands(text, prompt="$ ")) == [
        ('juice generate     "a\nb"', "out\n"),
        ("next", ""),
    ]
    assert list(commands("one 'a\nb'\ntwo\n")) == [("one 'a\nb'", ""), ("two", "")]


def test_a_block_that_begins_with_a_prompt_is_a_console() -> None:
    for each in BLOCKS.values():
        for block in each:
            assert block.language in RUNS or not block.text.startswith("$ "), f"{block}: console"


def test_every_fence_is_a_block() -> None:
    for page, block in BLOCKS.items():
        fences = re.findall(r"(?m)^ *(?:```|~~~)", page.read_text())
        assert len(fences) == 2 * len(block), page
