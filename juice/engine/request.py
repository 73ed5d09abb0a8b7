"""A generation request, the sequence it becomes while it runs, and the completion it ends as."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from juice.engine.sampling import Sampling
from juice.engine.steer import Steering, SteeringReport, unsteered
from juice.engine.text import TextStream
from juice.errors import RequestError

FinishReason = Literal["stop", "length"]
MAX_STOPS = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class GenerationRequest:
    """Tokens to continue, how to steer and sample, and when to stop.

    `watch` names tokens whose log-probability at the first new position is reported: how p_y is measured.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int = 64
    steering: Steering = field(default_factory=unsteered)
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    watch: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise RequestError("the prompt is empty; expected at least one token", param="prompt")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; expected at least 1", param="max_tokens")
        if len(self.stop) > MAX_STOPS or not all(self.stop):
            raise RequestError(f"stop holds {len(self.stop)} strings; expected at most {MAX_STOPS}, none of them empty", param="stop")

    def with_steering(self, steering: Steering) -> GenerationRequest:
        """Return this request, steered otherwise."""
        return replace(self, steering=steering)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a request came to.

    `token_ids` and `logprobs` (natural log, of the steered distribution before temperature and filters) include a stop
    token, `text` does not. `watched` holds the log-probabilities of the request's `watch` tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...]
    steering: SteeringReport
    n_prompt_tokens: int
    watched: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the completion as plain data."""
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "token_ids": list(self.token_ids),
            "logprobs": list(self.logprobs),
            "steering": self.steering.to_dict(),
            "n_prompt_tokens": self.n_prompt_tokens,
        }


class Sequence:
    """A running request: its tokens so far, its text, its own random generator, and how much of it is cached."""

    def __init__(self, request: GenerationRequest, text: TextStream) -> None:
        self.request = request
        self.text = text
        self.generator = request.sampling.new_generator()
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.watched: tuple[float, ...] = ()
        self.finish_reason: FinishReason | None = None
        self.n_cached = 0

    @property
    def n_rows(self) -> int:
        """Rows that this sequence occupies in its widest layer."""
        return 2 if self.request.steering.window else 1

    @property
    def pending(self) -> tuple[int, ...]:
        """Tokens that the model has not seen yet: the prompt first, then the newest token."""
        return tuple(self.token_ids[-1:]) if self.token_ids else self.request.prompt_ids

    def observe(self, logprobs: torch.Tensor) -> None:
        """Note the watched log-probabilities; logprobs: float32 [vocabulary] of the next token."""
        if not self.token_ids and self.request.watch:
            self.watched = tuple(logprobs[list(self.request.watch)].tolist())

    def append(self, token: int, logprob: float, stop_token_ids: frozenset[int]) -> str:
        """Take the next token; return the text that is now final."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in stop_token_ids and not self.request.ignore_eos:
            self.finish_reason = "stop"
            return self.text.finish()
        piece = self.text.push(token)
        if self.text.stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.request.max_tokens:
            self.finish_reason = "length"
            piece += self.text.finish()
        return piece

    def completion(self) -> Completion:
        """Return the result of a finished sequence."""
        assert self.finish_reason is not None, "the sequence still runs"
        return Completion(
            text=self.text.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            logprobs=tuple(self.logprobs),
            steering=self.request.steering.report,
            n_prompt_tokens=len(self.request.prompt_ids),
            watched=self.watched,
        )
