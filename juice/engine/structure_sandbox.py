"""The sandbox: a process in which forms of answers are compiled before they are trusted.

Some short forms take minutes and gigabytes to compile, and llguidance cannot be interrupted. So a
form is first compiled, and followed for some tokens, in a process of its own that has little time
and memory. That process runs this file alone, which therefore imports nothing of JuICE but its
errors.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from threading import Lock
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from juice.errors import GenerationError

# Half of the library's own work a token, which took a second, and a fifth of its states.
LIMITS = LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False)
# What the sandbox of one form may take, of the processor's time and of memory.
SANDBOX_S, SANDBOX_BYTES = 1.0, 256 << 20
# The tokens for which it is followed, the time after which that ends, and the most for one token.
N_FOLLOWED, FOLLOWING_S, TOKEN_S = 32, 0.3, 0.2
WHAT_HELPS = "make it simpler, with fewer optional parts, repeats and alternatives"
# In the library's words of what is too large, which name limits that nobody can set here.
LARGE = ("limit", "fuel", "too many", "too large", "too big", "max is", "panic")
NOTHING_FITS, NOT_ALLOWED = "NoExtensionBias", "doesn't satisfy the grammar"  # likewise
TOO_MUCH = f"takes more than {SANDBOX_S:g} s or {SANDBOX_BYTES >> 20} MB to compile; {WHAT_HELPS}"
# In a schema: keywords whose values are no schemas or must stay, those that hold schemas by name,
# and those beside which an object's properties are not all that it may have.
AS_THEY_ARE = frozenset({"const", "default", "enum", "examples", "not", "required"})
BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
OPEN = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref"}
    | {"anyOf", "oneOf", "if", "propertyNames", "minProperties"}
)
# As Python writes JSON. Where any white space is allowed, small models write it to the end.
JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def compiled(tokenizer: LLTokenizer, form: str, text: str) -> LLMatcher | str:
    """Return a matcher before its first token, or the reason why there is none."""
    try:
        matcher = LLMatcher(tokenizer, _grammar(form, text), log_level=0, limits=LIMITS)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return f"cannot be read: {first_line(str(error))}"
    return f"cannot be followed: {problem_of(matcher)}" if matcher.is_error() else matcher


def problem_of(matcher: LLMatcher) -> str:
    """Return the problem of a matcher that failed, in one line."""
    problem = first_line(matcher.get_error())
    if problem == NOTHING_FITS:
        return "no text fits; if it has $ref, look for those that lead back to themselves alone"
    if NOT_ALLOWED in problem:
        return "the model rules out every token that may come"
    if any(words in problem.lower() for words in LARGE):
        return f"{problem.partition(';')[0]}; {WHAT_HELPS}"
    return problem


def first_line(text: str) -> str:
    """Return the beginning of a library's message, without its state."""
    return text.partition("\n")[0].partition(" <state>")[0][:300]


def json_rule(schema: Mapping[str, Any] | str) -> str:
    """Return the rule, in Lark's notation, of JSON that is valid under a schema."""
    settled = _settled(json.loads(schema) if isinstance(schema, str) else schema)
    rules = settled if isinstance(settled, dict) else {"allOf": [settled]}
    return f"%json {json.dumps({'x-guidance': JSON, **rules})}"


def _grammar(form: str, text: str) -> str:
    """Return a structure in llguidance's own words; raises ValueError."""
    if form == "json_schema":
        settled = json.dumps(_settled(json.loads(text)))
        return str(LLMatcher.grammar_from_json_schema(settled, defaults=JSON))
    if form == "choice":
        texts = json.loads(text)
        if not texts:
            raise ValueError("it has no texts to choose from")
        # One terminal: rules for each are followed one by one, and 2,000 are the most.
        alternatives = " | ".join(map(json.dumps, texts))
        return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}"))
    return str(grammar_from("regex" if form == "regex" else "grammar", text))


def _settled(schema: Any) -> Any:
    """Return a schema as it is followed."""
    # Parts that hold together stay open, or none could add to another.
    return schema if '"allOf"' in json.dumps(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have the properties that it names, where it leaves that open.

    Else most models go on with properties of their own. What is valid under the result is valid
    under the schema.
    """
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        name: part
        if name in AS_THEY_ARE
        else {key: _closed(value) for key, value in part.items()}
        if name in BY_NAME and isinstance(part, dict)
        else _closed(part)
        for name, part in schema.items()
    }
    if isinstance(closed.get("properties"), dict) and not closed.keys() & OPEN:
        closed["additionalProperties"] = False
    return closed


def problem_when_followed(
    tokenizer: LLTokenizer, form: str, text: str, stop_token_ids: list[int]
) -> str:
    """Return the problem of a form, found by following it for some tokens; empty for none."""
    matcher = compiled(tokenizer, form, text)
    if isinstance(matcher, str):
        return matcher
    begun = now = time.process_time()
    for i in range(N_FOLLOWED):
        mask = bytearray(matcher.compute_bitmask())
        if matcher.is_error():
            return f"cannot be followed: {problem_of(matcher)}"
        last, now = now, time.process_time()
        if now - last > TOKEN_S:
            return f"takes more than {TOKEN_S:g} s a token; {WHAT_HELPS}"
        for token in stop_token_ids:
            mask[token // 8] &= ~(1 << token % 8)
        start = i * 7919 % len(mask)  # any token that may come, the same ones each time
        match = re.compile(rb"[^\0]").search(mask, start) or re.search(rb"[^\0]", mask)
        if match is None or now - begun > FOLLOWING_S:
            break
        bits = mask[match.start()]
        matcher.consume_token(8 * match.start() + (bits & -bits).bit_length() - 1)
    return ""


def main() -> None:
    """Check the forms that come, line by line, each in a process that ends with it."""
    about = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(
        about.pop("tokenizer"), n_vocab=about["n_tokens"], eos_token=about["stops"]
    )
    release_freed()
    for line in sys.stdin:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                n_bytes = _peak_bytes()
                resource.setrlimit(resource.RLIMIT_DATA, (n_bytes + SANDBOX_BYTES,) * 2)
                signal.setitimer(signal.ITIMER_PROF, SANDBOX_S)  # at its end the process does
                form, text = json.loads(line)
                problem = problem_when_followed(tokenizer, form, text, about["stops"])
                answer = json.dumps({"problem": problem, "n_bytes": _peak_bytes() - n_bytes})
                os.write(writing, answer.encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        sys.stdout.write(f"{answer or json.dumps({'problem': TOO_MUCH, 'n_bytes': 0})}\n")
        sys.stdout.flush()


def release_freed() -> None:
    """Give the system back what was freed: the C library keeps what reading a tokenizer took."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # GNU's alone has it
    if trim is not None:
        trim(0)


def _peak_bytes() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()


# As `python FILE`, with this process's path, and without the file's own folder in it.
START = "import runpy, sys; sys.path[:] = {path!r}; runpy.run_path({file!r}, run_name='__main__')"


class StructureSandbox:
    """Checks forms in a process of their own, one at a time; any thread may ask.

    The tokenizer is given as JSON.
    """

    def __init__(self, tokenizer: str, vocabulary_size: int, stop_token_ids: list[int]) -> None:
        about = {"tokenizer": tokenizer, "n_tokens": vocabulary_size, "stops": stop_token_ids}
        self._about = json.dumps(about)
        self._process: subprocess.Popen[str] | None = None
        self._lock = Lock()

    @property
    def pid(self) -> int | None:
        """The number of the process; None: it has not started yet."""
        return None if self._process is None else self._process.pid

    def __call__(self, form: str, text: str) -> tuple[str, int]:
        """Return the problem of a form, empty for none, and the bytes that it took.

        Raises GenerationError where that cannot be found out.
        """
        with self._lock:
            try:
                process = self._running()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(f"{json.dumps([form, text])}\n")
                process.stdin.flush()
                verdict = json.loads(process.stdout.readline())
            except (OSError, ValueError):  # it cannot start, or was ended from outside
                self._end()
                raise GenerationError(
                    "the process that tries structures out has ended, for lack of memory perhaps;"
                    " try again"
                ) from None
            return verdict["problem"], verdict["n_bytes"]

    def start(self) -> None:
        """Start the process before the first form does, and do not wait until it has."""
        with self._lock:
            try:
                self._running()
            except OSError:  # of which the first form is told
                self._end()

    def end(self) -> None:
        """End the process; the next form starts it again."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        command = START.format(path=sys.path, file=__file__)
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a library's words before it gives up
            text=True,
        )
        weakref.finalize(self, _end, process)
        self._process = process  # so that it is ended if it ends here
        assert process.stdin is not None
        process.stdin.write(f"{self._about}\n")
        process.stdin.flush()
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
