"""Processes of the command line, forked from one that has already imported the libraries.

The imports would otherwise take each process five seconds. All else is as in a fresh process:
arguments, folder, environment, signals, output, exit status. What the libraries read from the
environment at import is the forking process's, which is offline.

All workers of a test run share one forking process, which the first that needs it starts. It ends
with the run.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
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
    """A test process's side of the forking process."""

    def __init__(self) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
        owner = os.getppid() if run else os.getpid()  # a worker's parent ends after all workers
        path = Path(tempfile.gettempdir(), f"juice-tests-{run or owner}")
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(str(path))
                listener.listen()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.support.forking", str(path), str(owner)],
                    stdin=listener,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "HF_HUB_OFFLINE": "1"},
                )
                listener.close()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(path))
        self._turn, self._numbers = threading.Lock(), count()
        self._running: dict[int, Forked] = {}
        self._pids: dict[int, int] = {}
        self._heard = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._connection.close)

    def start(self, forked: Forked, job: dict[str, Any]) -> int:
        with self._turn:
            number = next(self._numbers)
            self._running[number] = forked
            _send(self._connection, {**job, "number": number})
        with self._heard:
            assert self._heard.wait_for(lambda: number in self._pids, 120), (
                "the forking process did not answer"
            )
            return self._pids.pop(number)

    def _listen(self) -> None:
        for line in self._connection.makefile():
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


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall((json.dumps(message) + "\n").encode())


def _next_job(listener: socket.socket, owner: int) -> dict[str, Any] | None:
    """Fork for every job that arrives and report how it ends; return in the child, with its job.

    Returns None when the process that owns this one has ended.
    """
    owned = os.pidfd_open(owner)  # readable from its end on
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    unread: dict[socket.socket, bytes] = {}
    running: dict[int, tuple[socket.socket, int]] = {}
    while True:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                connection, number = running.pop(pid)
                with suppress(OSError):  # that worker may have ended
                    _send(connection, {"number": number, "code": os.waitstatus_to_exitcode(status)})
        ready, _, _ = select.select([listener, woken, owned, *unread], [], [])
        if owned in ready:
            return None
        if woken in ready:
            os.read(woken, 4096)
        if listener in ready:
            unread[listener.accept()[0]] = b""
        for connection in unread.keys() & ready:
            more = connection.recv(1 << 20)
            *lines, unread[connection] = (unread[connection] + more).split(b"\n")
            for line in lines:
                job: dict[str, Any] = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for file in (woken, wake, owned):
                        os.close(file)
                    for other in (listener, *unread):
                        other.close()
                    return job
                running[pid] = connection, job["number"]
                _send(connection, {"number": job["number"], "pid": pid})
            if not more:
                del unread[connection]
                connection.close()


def _leave_at_once(codes: list[int]) -> None:
    """End a process whose exit status is known before its memory is freed.

    Freeing writes to every page that it shares with the forking process, each of which is copied.
    """
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


def main(path: Path, owner: int) -> NoReturn:
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
    job = _next_job(socket.socket(fileno=os.dup(0)), owner)
    if job is None:
        path.unlink()
        path.with_suffix(".lock").unlink()
        sys.exit()
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
    main(Path(sys.argv[1]), int(sys.argv[2]))
