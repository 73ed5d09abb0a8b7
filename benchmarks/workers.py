"""Engines that take turns, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping


class Worker:
    """A process that runs what it is asked to, and measures it.

    Args:
        module: What `python -m` runs; it calls `answer_questions`.
        arguments: Its arguments.
        environment: Variables beside those of this process.
        python: The interpreter; None: this one.

    Raises:
        RuntimeError: The process ended before it was ready.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        python: str | None = None,
    ) -> None:
        began = time.perf_counter()
        self._process = subprocess.Popen(  # noqa: S603 -- our own command
            [python or sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._answer()
        self.ready_s = time.perf_counter() - began

    def ask(self, question: str) -> float:
        """Return the answer to a question, such as the seconds that a way takes."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended with status {self._process.wait()}")
        return line.strip()


def answer_questions(make: Callable[[], Callable[[str], float | None]]) -> None:
    """In a worker: make the engine, then answer each line of standard input.

    A question is answered by a number, or by the seconds that it took where there is None.
    """
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is no answer
    reply = make()
    print("ready", file=answer, flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        found = reply(line.strip())
        print(time.perf_counter() - began if found is None else found, file=answer, flush=True)
