"""A type checker knows every option of the public calls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parent / "user_calls.py"


def test_mypy_accepts_right_calls_and_refuses_wrong_ones() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    refused = {int(line) for line in re.findall(r"user_calls\.py:(\d+): error", done.stdout)}
    lines = FILE.read_text().splitlines()
    expected = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(expected) > 15
    assert refused == expected, done.stdout + done.stderr
