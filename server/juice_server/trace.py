"""What is noted of one HTTP request while it is served: for its log line and for the metrics."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import Scope

from juice.engine import Completion

# What may stand in a log line and a header as it came.
ACCEPTED_ID = re.compile(r"[\w.:@/+=-]{1,128}", re.ASCII)


@dataclass
class Trace:
    """One request: its id, what was asked and what came of it; `code` is the error's."""

    id: str
    begun: float = field(default_factory=time.monotonic)
    code: str = ""
    steer: str = ""
    is_stream: bool = False
    n_prompt_tokens: int = 0
    n_generated_tokens: int = 0
    n_cancelled: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    prompts: Sequence[str] = ()

    @property
    def age_s(self) -> float:
        """Seconds since the request came."""
        return time.monotonic() - self.begun

    def note(self, completion: Completion) -> None:
        """Note what one choice came to."""
        self.n_generated_tokens += len(completion.tokens)
        self.finish_reasons.append(completion.finish_reason)


def trace_of(scope: Scope) -> Trace:
    """Return the trace of a request, begun where it is first asked for: the id is the client's, if it sent a sound one."""
    state = scope.setdefault("state", {})
    if "trace" not in state:
        sent = Headers(scope=scope).get("x-request-id", "")
        state["trace"] = Trace(
            id=sent if ACCEPTED_ID.fullmatch(sent) else f"req-{uuid.uuid4().hex}"
        )
    trace: Trace = state["trace"]
    return trace
