"""What the answers of both OpenAI routes share: their frame, their usage and a stream's chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any, ClassVar

from juice.engine import Completion, ScoredToken, SteeringReport
from juice_server.errors import Failure
from juice_server.schemas.openai import ChatRequest, CompletionRequest
from juice_server.schemas.shared import usage_of
from juice_server.service import Service
from juice_server.sse import Event
from juice_server.trace import Trace


class OpenAIAnswer:
    """Makes an answer from completions, or a stream's chunks from their updates."""

    says_done = True
    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self, service: Service, body: ChatRequest | CompletionRequest, trace: Trace
    ) -> None:
        self._texts, self._model_name = service.translator.texts, service.translator.model_name
        self._fingerprint = service.system_fingerprint
        self._include_usage, self._trace = body.include_usage, trace
        self._id, self._created = f"{self.id_prefix}-{uuid.uuid4().hex}", int(time.time())

    def closing(self, completions: list[Completion]) -> Iterable[Event]:  # noqa: ARG002
        """Yield a stream's last chunk, the usage, where it is wanted."""
        if self._include_usage:
            yield {**self._frame(self.chunk_kind, []), "usage": self._usage()}

    def failed(self, failure: Failure) -> Event:
        """Return the event of an error."""
        return failure.body()

    def _whole(self, choices: list[Event], steering: SteeringReport) -> Event:
        return {
            **self._frame(self.kind, choices),
            "usage": self._usage(),
            "steering": steering.to_dict(),
        }

    def _chunk(self, choice: Event, steering: SteeringReport | None = None) -> Event:
        chunk = self._frame(self.chunk_kind, [choice])
        if self._include_usage:
            chunk["usage"] = None
        if steering is not None:
            chunk["steering"] = steering.to_dict()
        return chunk

    def _frame(self, kind: str, choices: list[Event]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model_name,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    def _usage(self) -> Event:
        return usage_of(self._trace.n_prompt_tokens, self._trace.n_generated_tokens).model_dump()


def alternatives(token: ScoredToken) -> list[tuple[int, float]]:
    """Return the alternatives of a token, itself among them where there are any, best first."""
    own = [*token.top]
    if own and token.logprob is not None and token.id not in dict(own):
        own.append((token.id, token.logprob))
    return own
