"""Ways to run a model, each in a process: they take turns, and one that fails takes none with it.

Each has one round to warm up, and a number is the median of the rounds. A way may fail, end or
hang. Its process imports nothing else from here.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
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


class Turns:
    """The ways that run, and what was found of each.

    Args:
        start: Starts a way.
        n_rounds: Over how many rounds a median is taken; one to warm up goes before them.
        n_starting: How many ways start at once.
    """

    def __init__(self, start: Callable[[str], Worker], n_rounds: int, n_starting: int = 1) -> None:
        self.ways: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self._start, self._n_rounds, self._n_starting = start, n_rounds, n_starting
        self._workers: dict[str, Worker] = {}
        self._times: dict[str, dict[str, list[float]]] = {}

    def admit(self, group: Iterable[str]) -> None:
        """Let the ways of a group run, and no others; one that runs already goes on."""
        names = [name for name in group if name not in self.failed]
        for name in [running for running in self._workers if running not in names]:
            self._workers.pop(name).close()
        with ThreadPoolExecutor(self._n_starting) as pool:
            starts = {
                name: pool.submit(self._start, name) for name in names if name not in self._workers
            }
        for name, start in starts.items():
            try:
                self._workers[name] = start.result()
            except RuntimeError as error:
                self.failed[name] = f"it did not start: {error}"
                continue
            ready_s = round(self._workers[name].ready_s, 2)
            self.ways[name] = {"ready_s": ready_s, "memory_bytes": None, "seconds": {}}
            self._times[name] = {}

    def measure(
        self, n_rows: int, takes: Callable[[str], bool], report: Callable[[str], None]
    ) -> None:
        """Ask each way that takes so many rows, in turns."""
        parts = (f"prompts {n_rows}", f"step {n_rows}")
        for round_number in range(self._n_rounds + 1):
            what = f"round {round_number} of {self._n_rounds}" if round_number else "warm-up"
            report(f"{n_rows} at once: {what}")
            for name in filter(takes, tuple(self._workers)):
                try:
                    answers = [self._workers[name].ask(part) for part in parts]
                except RuntimeError as error:
                    self._fail(name, f"with {n_rows} at once it failed: {error}", parts)
                    continue
                self._workers[name].rest()
                self.ways[name]["memory_bytes"] = answers[-1][1]
                if round_number:
                    for part, (seconds, _) in zip(parts, answers, strict=True):
                        self._times[name].setdefault(part, []).append(seconds)
            for name, times in self._times.items():
                self.ways[name]["seconds"] = {
                    part: round(statistics.median(taken), 5) for part, taken in times.items()
                }

    def close(self) -> None:
        """End all ways."""
        while self._workers:
            self._workers.popitem()[1].close()

    def _fail(self, name: str, reason: str, parts: Iterable[str]) -> None:
        self.failed[name] = reason
        self._workers.pop(name).close()
        for part in parts:
            self._times[name].pop(part, None)
