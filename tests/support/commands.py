"""The `juice` command as a process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.forking import Forked


def juice(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    if any(name.startswith("HF_") for name in environment):  # read at import
        command = [sys.executable, "-m", "juice.cli.main", *arguments]
        return subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
        )
    with tempfile.TemporaryDirectory() as place:
        output, errors = Path(place, "output"), Path(place, "errors")
        output.touch()
        errors.touch()
        code = Forked(arguments, output=output, errors=errors, environment=env, folder=cwd).wait(
            300
        )
        return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())
