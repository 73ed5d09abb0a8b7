"""The real server as a process, on a free port, over real HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.support.forking import Forked

CONFLICT = "The name of the capital city of Peru is Cairo. The name of the capital city of Peru is"
LONG = {"prompt": CONFLICT, "max_tokens": 480, "ignore_eos": True}
# The keys of the server that needs one, and the header with the first.
KEYS = ("first-key", "zweiter-schlüssel")
BEARER = {"authorization": f"Bearer {KEYS[0]}"}
# What servers write to standard error, until the tests end.
ERRORS = tempfile.TemporaryDirectory(prefix="juice-servers-")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running `juice serve`."""

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        program: str | None = None,
        command: list[str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._errors = Path(tempfile.mkstemp(dir=ERRORS.name)[1])
        environment = {**os.environ, **(environment or {})}
        options = ("--port", str(self.port), *arguments)
        if "vllm" in arguments and program is None:
            # How vLLM's processes live and end is seen where they start as everywhere.
            command = command or [str(Path(sys.executable).with_name("juice")), "serve"]
        self.process: Forked | subprocess.Popen[bytes]
        if command is None:
            self.process = Forked(
                ("serve", *options),
                output=Path(os.devnull),
                errors=self._errors,
                program=program,
                environment=environment,
                folder=folder,
            )
            return
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, *options],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                cwd=folder,
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 240
        # One client: each reads every certificate of the machine, which would slow the start down.
        with httpx.Client(base_url=self.url) as client:
            while time.monotonic() < deadline and self.process.poll() is None:
                with suppress(httpx.TransportError):
                    if client.get("/readyz").status_code == 200:
                        return
                time.sleep(0.1)
        self.process.kill()
        self.process.wait()
        raise AssertionError(f"the server did not become ready: {self.errors()}")

    def errors(self) -> str:
        """Return what it wrote to standard error."""
        return self._errors.read_text()

    def log(self) -> list[dict[str, Any]]:
        """Return the lines of its log, parsed."""
        return [json.loads(line) for line in self.errors().splitlines() if line.startswith("{")]

    def connect(self) -> socket.socket:
        """Return a raw connection to it."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=60)


@contextmanager
def serving(*arguments: str, **options: Any) -> Iterator[Server]:
    """Run a server for the block; it must exit with 0 and without an uncaught exception."""
    server = Server(*arguments, **options)
    try:
        server.wait_until_ready()
        yield server
        assert server.stop() == 0, server.errors()
        assert not [line for line in server.errors().splitlines() if line.startswith("Traceback")]
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert lines.count("[DONE]") == 1
    return [json.loads(line) for line in lines[:-1]]


def gauge(url: str, name: str, **headers: str) -> float:
    """Return the value of a metric without labels."""
    text = httpx.get(f"{url}/metrics", headers=headers).text
    return float(
        next(line.split()[-1] for line in text.splitlines() if line.startswith(f"juice_{name} "))
    )


def within(seconds: float, is_so: Callable[[], bool], what: str) -> None:
    """Wait until something is so; fail after this many seconds."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def raw_post(body: dict, path: str = "/generate") -> bytes:
    """Return the bytes of a POST request."""
    content = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n".encode()
        + content
    )
