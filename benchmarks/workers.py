"""Engines that take turns, each in a process of its own.

One that fails, ends or hangs is reported by an error, and takes nothing else with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Timer
from typing import Any

# One that takes longer hangs.
LIMIT_S = 1800.0
# What a process has to end by itself, and then its memory to be free again.
ENDS_WITHIN_S = 15.0
# vLLM's processes poll for a second after their work, and take processors from who comes next.
VLLM_RESTS_WITHIN_S = 1.5


class Worker:
    """A process that runs what it is asked to, and measures it.

    Args:
        module: What `python -m` runs; it calls `answer_questions`.
        arguments: Its arguments.
        environment: Variables beside those of this process.
        python: The interpreter; None: this one.
        limit_s: How long it may take until it is ready, and for an answer.
        rest_s: How long its own processes may still compute after an answer.

    Raises:
        RuntimeError: It failed, or ended, or took too long, before it was ready.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        python: str | None = None,
        limit_s: float = LIMIT_S,
        rest_s: float = 0.0,
    ) -> None:
        began = time.perf_counter()
        self._limit_s, self._rest_s = limit_s, rest_s
        self._process = subprocess.Popen(  # noqa: S603 -- our own command
            [python or sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # so that its own processes end with it
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        self.ready_s = time.perf_counter() - began

    def ask(self, question: str) -> Any:
        """Return the answer to a question, such as the seconds that a way takes.

        Raises RuntimeError where it failed, ended, or took too long.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which the answer reports
            self._process.stdin.write(f"{question}\n")
            self._process.stdin.flush()
        return self._answer()

    def rest(self) -> None:
        """Wait until it takes no processor from who comes next."""
        time.sleep(self._rest_s)

    def close(self) -> None:
        """End the process and those that it started, and wait until they are gone."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDS_WITHIN_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        until = time.monotonic() + ENDS_WITHIN_S
        while self._signal(0) and time.monotonic() < until:
            time.sleep(0.05)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()

    def _signal(self, number: int) -> bool:
        """Signal all its processes; return whether there are any."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        began = time.monotonic()
        timer = Timer(self._limit_s, self._signal, [signal.SIGKILL])
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if line:
            answer = json.loads(line)
            if "error" in answer:
                raise RuntimeError(answer["error"])
            return answer["answer"]
        if time.monotonic() - began >= self._limit_s:
            raise RuntimeError(f"it took longer than {self._limit_s:g} s")
        raise RuntimeError(f"its process ended with status {self._process.wait()}")


def answer_questions(make: Callable[[], Callable[[str], Any]]) -> None:
    """In a worker: make the engine, then answer each line of standard input.

    A question is answered by what is returned, or by the seconds that it took where that is None.
    A failure is an answer too: its reason goes to the one who asked, its traceback to the log.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is no answer

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=channel, flush=True)

    try:
        reply = make()
    except Exception as error:
        traceback.print_exc()
        say(error=_reason(error))
        raise SystemExit(1) from None
    say(answer="ready")
    for line in sys.stdin:
        began = time.perf_counter()
        try:
            found = reply(line.strip())
        except Exception as error:
            traceback.print_exc()
            say(error=_reason(error))
        else:
            say(answer=time.perf_counter() - began if found is None else found)


def _reason(error: Exception) -> str:
    """Return the kind of an error and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
