"""Processes of the command line, forked from one that has already imported the libraries.

The imports would otherwise take each process five seconds. All else is as in a fresh process:
arguments, folder, environment, signals, output, exit status. What the libraries read from the
environment at import is the forking process's, which is offline.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "juice.cli.options",
    "juice.checks",
    "juice.evaluation",
    "juice.evaluation.report.figures",
    "juice.identification.find",
    "juice.data",
    "juice.steered_model",
    "juice_server.app",
    "juice_server.process",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
# Also, where servers run on vLLM unless they are told not to (JUICE_ENGINE).
PRELOADED_WITH_VLLM = ("juice.engine.vllm.start", "vllm.v1.engine.core")


class Forked:
    """A process of `juice`, with the part of subprocess.Popen's interface that tests use.

    `program` is Python that runs in its place.
    """

    def __init__(
        self,
        arguments: tuple[str, ...],
        *,
        output: Path,
        errors: Path,
        given: Path | None = None,
        program: str | None = None,
        environment: dict[str, str],
        folder: Path | None,
    ) -> None:
        self._ended = threading.Event()
        self.returncode: int | None = None
        job = {
            "arguments": arguments,
            "output": str(output),
            "errors": str(errors),
            "given": str(given or os.devnull),
            "program": program,
            "environment": environment,
            "folder": str(folder or Path.cwd()),
        }
        self.pid = _forker().start(self, job)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("juice", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()


class _Forker:
    """The test process's side of the forking process: started at first use, ended with it."""

    def __init__(self) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "tests.support.forking"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self._turn, self._numbers = threading.Lock(), count()
        self._running: dict[int, Forked] = {}
        self._pids: dict[int, int] = {}
        self._heard = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._process.kill)

    def start(self, forked: Forked, job: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        with self._turn:
            number = next(self._numbers)
            self._running[number] = forked
            self._process.stdin.write(json.dumps({**job, "number": number}) + "\n")
            self._process.stdin.flush()
        with self._heard:
            assert self._heard.wait_for(lambda: number in self._pids, 120), (
                "the forking process did not answer"
            )
            return self._pids.pop(number)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            report = json.loads(line)
            if "pid" in report:
                with self._heard:
                    self._pids[report["number"]] = report["pid"]
                    self._heard.notify_all()
            else:
                self._running.pop(report["number"]).end(report["code"])


_forkers: list[_Forker] = []


def _forker() -> _Forker:
    if not _forkers:
        _forkers.append(_Forker())
    return _forkers[0]


def _next_job() -> dict[str, Any]:
    """Fork for every job that arrives and report how it ends; return in the child, with its job."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    rest, running = b"", dict[int, int]()
    while True:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _report(number=running.pop(pid), code=os.waitstatus_to_exitcode(status))
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        if 0 not in ready:
            continue
        more = os.read(0, 1 << 20)
        if not more:
            sys.exit()
        *lines, rest = (rest + more).split(b"\n")
        for line in lines:
            job: dict[str, Any] = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(wake)
                return job
            running[pid] = job["number"]
            _report(number=job["number"], pid=pid)


def _report(**values: int) -> None:
    os.write(1, (json.dumps(values) + "\n").encode())


def _leave_at_once(codes: list[int]) -> None:
    """End a process whose exit status is known before its memory is freed.

    Freeing writes to every page that it shares with the forking process, each of which is copied.
    """
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


def main() -> NoReturn:
    codes: list[int] = []
    atexit.register(_leave_at_once, codes)  # the first to be registered is the last to run
    for name in PRELOADED:
        __import__(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from juice.cli.main import main as juice

    get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns at its first use
    if os.environ.get("JUICE_ENGINE") == "vllm":
        from juice.engine.vllm.launch import ENVIRONMENT
        from tests.support.on_vllm import fork_vllms_processes

        os.environ.update(ENVIRONMENT)
        for name in PRELOADED_WITH_VLLM:
            __import__(name)
        fork_vllms_processes()

    gc.collect()
    gc.freeze()  # what exists before the fork is never garbage
    job = _next_job()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    files = [
        os.open(job["given"], os.O_RDONLY),
        *(os.open(job[name], os.O_WRONLY | os.O_APPEND) for name in ("output", "errors")),
    ]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["juice", *job["arguments"]]
    try:
        if job["program"] is None:
            juice()
        else:
            exec(job["program"], {})  # noqa: S102 -- the test's own
        sys.exit()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            codes.append(end.code or 0)
        raise


if __name__ == "__main__":
    main()
