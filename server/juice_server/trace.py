"""What is recorded of one HTTP request, for its log line and the metrics."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import Scope

from juice.engine import Completion, GateReport, GenerationRequest
from juice_server.clients import Client, address_of

# What is safe to repeat in a log line and a header.
ACCEPTED_ID = re.compile(r"[\w.:@/+=-]{1,128}", re.ASCII)


@dataclass
class Trace:
    """One request: its id, who sent it, its options and its outcome; `code` is that of an error.

    `begun` and `submitted` are times of the monotonic clock, in seconds; `completions` come in the
    order in which they ended. What `is_dull` comes every few seconds and is worth no line.
    """

    id: str
    client: Client
    priority: int = 0
    n_body_bytes: int = 0
    begun: float = field(default_factory=time.monotonic)
    code: str = ""
    steer: str = ""
    is_stream: bool = False
    is_dull: bool = False
    n_prompt_tokens: int = 0
    n_choices: int = 1
    prompts: Sequence[str] = ()
    requests: Sequence[GenerationRequest] = ()
    submitted: float = 0.0
    completions: list[Completion] = field(default_factory=list)

    @property
    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.begun

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Record what the engine is asked for, and that it is asked now."""
        self.requests, self.submitted = requests, time.monotonic()

    @property
    def n_generated_tokens(self) -> int:
        """The tokens of all choices that are complete."""
        return sum(len(own.tokens) for own in self.completions)

    @property
    def finish_reasons(self) -> list[str]:
        """Why each choice ended."""
        return [own.finish_reason for own in self.completions]

    @property
    def gates(self) -> list[GateReport]:
        """What gates decided."""
        return [own.steering.gate for own in self.completions if own.steering.gate is not None]


def trace_of(scope: Scope) -> Trace:
    """Return the trace of a request, made on first use, with the client's id if that is valid."""
    state = scope.setdefault("state", {})
    if "trace" not in state:
        sent = Headers(scope=scope).get("x-request-id", "")
        state["trace"] = Trace(
            id=sent if ACCEPTED_ID.fullmatch(sent) else f"req-{uuid.uuid4().hex}",
            client=Client(name=address_of(scope)),
        )
    trace: Trace = state["trace"]
    return trace
