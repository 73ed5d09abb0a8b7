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
class Run:
    """What the engine is asked for at once.

    Args:
        requests: The requests.
        n_prompt_tokens: The tokens of their prompts, those of several choices once.
        submitted: When they were submitted, on the monotonic clock, in seconds.
        ended: The completions so far, by index.
    """

    requests: Sequence[GenerationRequest]
    n_prompt_tokens: int
    submitted: float = field(default_factory=time.monotonic)
    ended: dict[int, Completion] = field(default_factory=dict)

    @property
    def completions(self) -> list[Completion]:
        """The completions so far, in the order of the requests."""
        return [self.ended[i] for i in sorted(self.ended)]


@dataclass
class Trace:
    """One HTTP request: its id, who sent it, its options, its outcome; `code` is that of an error.

    `begun` is a time of the monotonic clock, in seconds. What `is_dull` comes every few seconds
    and is worth no line.
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
    n_choices: int = 1
    prompts: Sequence[str] = ()
    runs: list[Run] = field(default_factory=list)

    @property
    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.begun

    def submit(self, requests: Sequence[GenerationRequest]) -> Run:
        """Record that the engine is asked now; `n_choices` requests in a row have one prompt."""
        run = Run(requests, sum(len(own.prompt_ids) for own in requests[:: self.n_choices]))
        self.runs.append(run)
        return run

    @property
    def completions(self) -> list[Completion]:
        """What has ended so far, in the order in which it was asked for."""
        return [own for run in self.runs for own in run.completions]

    @property
    def n_prompt_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(run.n_prompt_tokens for run in self.runs)

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
