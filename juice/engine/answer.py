"""The updates of a request while it runs, and its completion at the end, from any engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from juice.engine.steer import SteeringReport
from juice.errors import JuiceError
from juice.head_set.schema import spelled

FinishReason = Literal["stop", "length"]


class ScoredToken(NamedTuple):
    """A token, its log-probability, the likeliest alternatives with theirs, and its text.

    Alternatives come best first. Log-probabilities are natural logs, of the steered distribution
    before temperature, penalties and cuts (top_k, top_p, min_p); a prompt's first token has none.
    The texts of an answer's tokens, joined, are the answer's text: a special token has none, nor
    has one that ends within a character; the one that completes it has all of it.
    """

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """When things happened, in seconds after a request was made.

    Args:
        queued_s: When it started.
        tokens_s: When each new token came.
        gate_s: When its gate began to decide, and when it had; None without one. One that is not
            steered starts again then.
    """

    queued_s: float
    tokens_s: tuple[float, ...]
    gate_s: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Completion:
    """The result of a request.

    Args:
        text: The new text, without a stop token or stop string.
        tokens: The new tokens, a stop token included.
        finish_reason: `stop`, or `length` after `max_tokens`.
        steering: The steering that was applied.
        n_prompt_tokens: The tokens of the prompt.
        timing: When things happened.
        prompt_tokens: The scored tokens of the prompt; empty without `prompt_logprobs`.
        watched: The log-probabilities of the request's `watch` tokens.
        n_cached_tokens: The tokens of the prompt that were not computed, since an earlier request's
            keys and values serve them.
        stop_string: The stop string that ended it; empty where none did.
    """

    text: str
    tokens: tuple[ScoredToken, ...]
    finish_reason: FinishReason
    steering: SteeringReport
    n_prompt_tokens: int
    timing: Timing
    prompt_tokens: tuple[ScoredToken, ...] = ()
    watched: tuple[float, ...] = ()
    n_cached_tokens: int = 0
    stop_string: str = ""

    def __repr__(self) -> str:
        report = self.steering
        strengths = report.strength if isinstance(report.strength, tuple) else (report.strength,)
        spelled_out = ", ".join(f"{one:g}" for one in strengths)
        strength = f", strength {spelled_out}" if report.strength != 1 else ""
        with_heads = (
            f" with {report.head_set} "
            f"({spelled(report.beta_plus)} {spelled(report.beta_minus)}{strength})"
            if report.head_set
            else strength
        )
        toward = f" toward {report.target}" if report.target else ""
        how = f"{report.method}{toward}{with_heads}" if report.applied else "unsteered"
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
    """An update on one request: what is new since the last one.

    `index` is the request's number among those submitted together, and `queued_s` when it started,
    in seconds after it was made. The last update has the completion, or the error.
    """

    index: int
    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    queued_s: float = 0.0
    completion: Completion | None = None
    error: JuiceError | None = None

    @property
    def is_last(self) -> bool:
        """Whether this is the request's last update."""
        return self.completion is not None or self.error is not None


def cut(update: Update, n_top: int) -> Update:
    """Return an update whose tokens have at most so many alternatives."""
    completion = update.completion
    if completion is not None:
        completion = replace(
            completion,
            tokens=_cut(completion.tokens, n_top),
            prompt_tokens=_cut(completion.prompt_tokens, n_top),
        )
    return replace(update, tokens=_cut(update.tokens, n_top), completion=completion)


def _cut(tokens: tuple[ScoredToken, ...], n_top: int) -> tuple[ScoredToken, ...]:
    return tuple(token._replace(top=token.top[:n_top]) for token in tokens)


# Takes an update in the engine's thread; it must neither block nor raise.
Sink = Callable[[Update], None]
