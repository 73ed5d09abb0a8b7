"""What a request has generated so far, and what its caller is told: the same in any engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

from juice.engine.completion import (
    Completion,
    FinishReason,
    ScoredToken,
    Sink,
    Timing,
    Update,
)
from juice.engine.request import GenerationRequest
from juice.engine.text import TextStream
from juice.errors import JuiceError


class Transcript:
    """The tokens and the text of one request; it decides when they end, and sends the updates.

    Args:
        index: The number of the request among those submitted together.
        request: The request.
        text: The text of its new tokens.
        stop_token_ids: The model's own stop tokens.
        sink: Takes its updates.
    """

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        text: TextStream,
        stop_token_ids: frozenset[int],
        sink: Sink,
    ) -> None:
        own = frozenset(request.stop_token_ids)
        self.stop_token_ids = own if request.ignore_eos else own | stop_token_ids
        self.tokens: list[ScoredToken] = []
        self.prompt_tokens: list[ScoredToken] = (
            [ScoredToken(request.prompt_ids[0], None)] if request.prompt_logprobs else []
        )
        self.watched: tuple[float, ...] = ()
        self.finish_reason: FinishReason | None = None
        self._index, self._request, self._text, self._sink = index, request, text, sink
        self._news, self._n_sent = "", 0
        self._arrived = time.monotonic()
        self._queued_s = 0.0
        self._tokens_s: list[float] = []

    def start(self) -> None:
        """Record that the request no longer waits."""
        self._queued_s = time.monotonic() - self._arrived

    def add(self, tokens: Sequence[ScoredToken]) -> None:
        """Take the next tokens up to the one that ends the text, and send what they make final.

        Raises whatever a tokenizer or a sink raises.
        """
        for token in tokens:
            self._tokens_s.append(time.monotonic() - self._arrived)
            piece = self._text_of(token.id)
            self.tokens.append(token._replace(text=piece))
            self._news += piece
            if self.finish_reason is not None:
                return
        self._sink(self._update())

    def complete(self) -> None:
        """Send the last update: the completion of a finished request."""
        self._sink(self._update(self._completion()))

    def fail(self, error: JuiceError) -> None:
        """Send an error as the last update."""
        self._sink(Update(index=self._index, error=error))

    def _text_of(self, token: int) -> str:
        """Return the text that the next token makes final, and note whether it is the last."""
        if token in self.stop_token_ids:
            self.finish_reason = "stop"
            return self._text.finish()
        piece = self._text.push(token, may_stop=len(self.tokens) >= self._request.min_tokens)
        if self._text.stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) + 1 == self._request.max_tokens:
            self.finish_reason = "length"
            piece += self._text.finish()
        return piece

    def _update(self, completion: Completion | None = None) -> Update:
        text, self._news = self._news, ""
        new, self._n_sent = tuple(self.tokens[self._n_sent :]), len(self.tokens)
        return Update(
            index=self._index,
            text=text,
            tokens=new,
            queued_s=self._queued_s,
            completion=completion,
        )

    def _completion(self) -> Completion:
        assert self.finish_reason is not None, "the request still runs"
        return Completion(
            text=self._text.text,
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason,
            steering=self._request.steering.report,
            n_prompt_tokens=len(self._request.prompt_ids),
            timing=Timing(queued_s=self._queued_s, tokens_s=tuple(self._tokens_s)),
            prompt_tokens=tuple(self.prompt_tokens),
            watched=self.watched,
        )
