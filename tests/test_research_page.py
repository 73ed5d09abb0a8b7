"""The page on research: its Python, run as one script, and its commands print what it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "research.md"
MARK = "----- next block"


def shown() -> list[tuple[str, str]]:
    """Return the page's Python blocks, each with the output below it."""
    found = re.findall(r"(?ms)^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", PAGE.read_text())
    assert len(found) >= 5
    return found


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python with the arguments but the last, in the folder that is the last."""
    *command, folder = arguments
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(Path(folder) / "cache"),
        "JUICE_HEAD_SETS": str(ROOT / "head_sets"),
    }
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.long
def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    facts = (ROOT / "juice" / "models" / "mini" / "examples.jsonl").read_text().splitlines()[:200]
    (tmp_path / "mine.jsonl").write_text("\n".join(facts) + "\n")
    (task,) = re.findall(r"(?ms)^```yaml\n(.*?)^```", PAGE.read_text())
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "conflicts.yaml").write_text(task)
    blocks = shown()
    script = tmp_path / "page_script.py"
    script.write_text(f"\nprint({MARK!r})\n".join(code for code, _ in blocks))
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = done.stdout.split(f"{MARK}\n")
    for (code, expected), output in zip(blocks, printed, strict=True):
        assert words(output) == words(expected), code
    written = {path.name for path in (tmp_path / "report").iterdir()}
    assert {"answers.csv", "report.html", "seeds.csv", "seeds"} <= written
    (console,) = re.findall(r"(?ms)^```console\n(.*?)^```", PAGE.read_text())
    commands = console.replace("\\\n", " ").split("$ python ")[1:]
    assert len(commands) == 2
    for each in commands:
        command, _, expected = each.partition("\n")
        done = run(*shlex.split(command), tmp_path)
        printed = "\n".join(line for line in done.stdout.splitlines() if line.startswith("|"))
        assert words(printed) == words(expected), done.stderr[-3000:]
