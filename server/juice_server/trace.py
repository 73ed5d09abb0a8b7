"""What is recorded of one HTTP request, for its log line and the metrics."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import Scope

from juice.engine import Completion, GateReport
from juice_server.clients import Client, address_of

# What is safe to repeat in a log line and a header.
ACCEPTED_ID = re.compile(r"[\w.:@/+=-]{1,128}", re.ASCII)


@dataclass
class Trace:
    """One request: its id, who sent it, its options and its outcome; `code` is that of an error."""

    id: str
    client: Client
    priority: int = 0
    n_body_bytes: int = 0
    begun: float = field(default_factory=time.monotonic)
    code: str = ""
    steer: str = ""
    is_stream: bool = False
    n_prompt_tokens: int = 0
    n_generated_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    gates: list[GateReport] = field(default_factory=list)
    prompts: Sequence[str] = ()

    @property
    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.begun

    def note(self, completion: Completion) -> None:
        """Record the outcome of one choice."""
        self.n_generated_tokens += len(completion.tokens)
        self.finish_reasons.append(completion.finish_reason)
        if completion.steering.gate is not None:
            self.gates.append(completion.steering.gate)


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
