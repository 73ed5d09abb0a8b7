"""The process in which forms of answers are tried out, started when the first one comes."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from threading import Lock

from juice.engine import grammar
from juice.errors import GenerationError

# As `python FILE`, with this process's path, and without the file's own folder in it.
START = "import runpy, sys; sys.path[:] = {path!r}; runpy.run_path({file!r}, run_name='__main__')"


class Trial:
    """Tries out forms, one at a time; any thread may ask.

    Args:
        tokenizer: The tokenizer, as JSON.
        vocabulary_size: How many logits the model has.
        stop_token_ids: Any of these ends an answer.
    """

    def __init__(self, tokenizer: str, vocabulary_size: int, stop_token_ids: list[int]) -> None:
        about = {"tokenizer": tokenizer, "n_tokens": vocabulary_size, "stops": stop_token_ids}
        self._about = json.dumps(about)
        self._process: subprocess.Popen[str] | None = None
        self._lock = Lock()

    @property
    def pid(self) -> int | None:
        """The number of the process; None: there was nothing to try out yet."""
        return None if self._process is None else self._process.pid

    def __call__(self, form: str, text: str) -> tuple[str, int]:
        """Return what is wrong with a form, empty for nothing, and the bytes that it took.

        Raises GenerationError where that cannot be found out.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            try:
                self._process.stdin.write(f"{json.dumps([form, text])}\n")
                self._process.stdin.flush()
                found = json.loads(self._process.stdout.readline())
            except (OSError, ValueError):  # it was ended from outside
                _end(self._process)
                raise GenerationError(
                    "the process that tries structures out has ended, for lack of memory perhaps;"
                    " try again"
                ) from None
            return found["problem"], found["n_bytes"]

    def _start(self) -> subprocess.Popen[str]:
        command = START.format(path=sys.path, file=grammar.__file__)
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a library's words before it gives up
            text=True,
        )
        weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(f"{self._about}\n")
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
