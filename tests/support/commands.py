"""The `juice` command: as a process, as one to interrupt, and within the test's own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TextIO

from typer.testing import CliRunner

from juice.cli.main import app
from tests.support.forking import Forked


def juice(
    *arguments: str,
    cwd: Path | None = None,
    given: str = "",
    program: str | None = None,
    timeout: float = 300,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command as a process to its end, offline unless the environment says otherwise.

    `given` is its standard input; `program` is Python that runs in its place; `timeout` is in
    seconds.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    if any(name.startswith("HF_") for name in environment):  # read at import
        command = [sys.executable, "-m", "juice.cli.main", *arguments]
        return subprocess.run(
            command,
            input=given,
            cwd=cwd,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    with tempfile.TemporaryDirectory() as place:
        output, errors, stdin = (Path(place, name) for name in ("output", "errors", "given"))
        output.touch()
        errors.touch()
        stdin.write_text(given)
        process = Forked(
            arguments,
            output=output,
            errors=errors,
            given=stdin,
            program=program,
            environment=env,
            folder=cwd,
        )
        code = process.wait(timeout)
        return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())


def interruptible(
    *arguments: str, errors: TextIO | int = subprocess.PIPE, **environment: str
) -> subprocess.Popen[str]:
    """Start the command as a process that SIGINT interrupts, as from a terminal.

    `errors` is where its standard error goes.
    """
    # A shell's background job starts with SIGINT ignored; a terminal's does not.
    return subprocess.Popen(
        [sys.executable, "-m", "juice.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={**os.environ, **environment},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def invoke(*arguments: str) -> tuple[int, str, str]:
    """Run the command in this process; return its exit code, standard output and error."""
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr
