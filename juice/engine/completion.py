"""What comes back from an engine: news while a request runs, and its completion at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from juice.engine.steering import SteeringReport
from juice.errors import JuiceError

FinishReason = Literal["stop", "length"]


class ScoredToken(NamedTuple):
    """A token, its log-probability, and the likeliest alternatives with theirs, best first.

    Log-probabilities are natural, of the steered distribution before temperature, penalties and
    cuts; a prompt's first token has none.
    """

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timing:
    """When things happened, in seconds after the request reached the engine: `tokens_s` holds every new token's moment."""

    queued_s: float
    tokens_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Completion:
    """What a request came to.

    `tokens` includes a stop token, `text` does not. `prompt_tokens` is there with
    `prompt_logprobs`; `watched` holds the log-probabilities of the request's `watch` tokens.
    """

    text: str
    tokens: tuple[ScoredToken, ...]
    finish_reason: FinishReason
    steering: SteeringReport
    n_prompt_tokens: int
    timing: Timing
    prompt_tokens: tuple[ScoredToken, ...] = ()
    watched: tuple[float, ...] = ()

    def __repr__(self) -> str:
        own = self.steering
        strength = f", strength {own.strength:g}" if own.strength != 1 else ""
        with_heads = (
            f" with {own.head_set} ({own.beta_plus:+g} {own.beta_minus:+g}{strength})"
            if own.head_set
            else strength
        )
        how = f"{own.method} toward {own.target}{with_heads}" if own.applied else "unsteered"
        return f"<Completion {self.text!r}: {how}; {len(self.tokens)} tokens, {self.finish_reason}>"

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The new tokens."""
        return tuple(token.id for token in self.tokens)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The new tokens' log-probabilities."""
        return tuple(token.logprob for token in self.tokens if token.logprob is not None)

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


@dataclass(frozen=True, kw_only=True)
class Update:
    """News of request number `index`: text and tokens that have become final; the last one has a completion or an error."""

    index: int
    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    completion: Completion | None = None
    error: JuiceError | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing more comes of this request."""
        return self.completion is not None or self.error is not None


# Takes an update, in the engine's thread: it must neither block nor raise.
Sink = Callable[[Update], None]
