"""The record of one HTTP request, for its log line, its metrics and its spans."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network

from starlette.datastructures import Headers
from starlette.types import Scope

from juice.engine.answer import Completion
from juice.engine.request import Request
from juice_server.keys import Client

# What is safe to repeat in a log line and a header.
ACCEPTED_ID = re.compile(r"[\w.:@/+=-]{1,128}", re.ASCII)


@dataclass
class Submission:
    """Requests that an HTTP request submits at once, and their completions so far, by number.

    So many of them in a row as there are choices share a prompt. `n_abandoned_tokens`
    are those that were generated for requests that did not complete.
    """

    requests: Sequence[Request]
    n_choices: int
    ended: dict[int, Completion] = field(default_factory=dict)
    n_abandoned_tokens: int = 0

    @property
    def completions(self) -> list[Completion]:
        """Those so far, in the order of the requests."""
        return [self.ended[i] for i in sorted(self.ended)]

    @property
    def n_prompt_tokens(self) -> int:
        """The tokens of the prompts, each once."""
        return sum(len(one.prompt_ids) for one in self.requests[:: self.n_choices])

    @property
    def n_generated_tokens(self) -> int:
        """The tokens of all choices that are complete or abandoned."""
        return self.n_abandoned_tokens + sum(len(one.tokens) for one in self.completions)

    @property
    def n_cached_tokens(self) -> int:
        """Those of them that were not computed, of the prompts whose first choice has ended."""
        firsts = range(0, len(self.requests), self.n_choices)
        return sum(self.ended[i].n_cached_tokens for i in firsts if i in self.ended)


@dataclass
class Trace:
    """The record of one HTTP request: its id, who sent it, its outcome; `code` is that of an error.

    `begun` is in seconds of the monotonic clock. What `is_dull` comes every few seconds and is
    worth no line. `steer` is the target, empty for several; `prompts` are kept where the settings
    say so.
    """

    id: str
    client: Client
    n_body_bytes: int = 0
    begun: float = field(default_factory=time.monotonic)
    code: str = ""
    steer: str = ""
    n_choices: int = 1
    is_stream: bool = False
    is_dull: bool = False
    prompts: Sequence[str] = ()
    submissions: list[Submission] = field(default_factory=list)

    @property
    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.begun

    @property
    def requests(self) -> list[Request]:
        """All requests that were submitted."""
        return [one for submission in self.submissions for one in submission.requests]

    @property
    def completions(self) -> list[Completion]:
        """The completions so far, in the order of the requests."""
        return [one for submission in self.submissions for one in submission.completions]

    @property
    def n_prompt_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(submission.n_prompt_tokens for submission in self.submissions)

    @property
    def n_cached_tokens(self) -> int:
        """Those of them that were not computed, of the prompts whose first choice has ended."""
        return sum(submission.n_cached_tokens for submission in self.submissions)

    @property
    def n_generated_tokens(self) -> int:
        """The tokens of all choices that are complete or abandoned."""
        return sum(submission.n_generated_tokens for submission in self.submissions)


def trace_of(scope: Scope) -> Trace:
    """Return the trace of a request, made on first use, with the client's id if that is valid."""
    state = scope.setdefault("state", {})
    if "trace" not in state:
        sent = Headers(scope=scope).get("x-request-id", "")
        peer = scope.get("client")
        state["trace"] = Trace(
            id=sent if ACCEPTED_ID.fullmatch(sent) else f"req-{uuid.uuid4().hex}",
            client=Client(name=network_of(peer[0]) if peer else ""),
        )
    trace: Trace = state["trace"]
    return trace


# A household or a machine has this many bits of an IPv6 address to itself, at least.
IPV6_PREFIX = 64


def network_of(host: str) -> str:
    """Return the network of an IPv6 address, an IPv4 address as it is, "unknown" for the rest."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return "unknown"  # a proxy's header may have anything
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((address, IPV6_PREFIX), strict=False))
