"""What an engine takes: tokens to continue, how to steer and sample, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from juice.engine.gate import RequestGate
from juice.engine.steering import Steering, unsteered
from juice.engine.structure import Structure
from juice.errors import ContextLengthError, RequestError
from juice.options import SamplingOptions

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Context-aware decoding (Shi et al., 2024): the prompt without its context, and its weight.

    Every token is chosen from `(1 + weight) * logits - weight * logits without the context`, and
    goes into both rows. An adaptive contrast (AdaCAD, Wang et al., 2025) multiplies the weight at
    every token by the Jensen-Shannon divergence of the two distributions, in bits, 0 to 1.
    """

    prompt_ids: tuple[int, ...]
    weight: float = 1.0
    is_adaptive: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class GenerationRequest:
    """Tokens to continue, how to steer and sample, and when to stop.

    Args:
        prompt_ids: The tokens of the prompt.
        max_tokens: The largest number of new tokens; 0 only with `prompt_logprobs`.
        min_tokens: The number of new tokens before which nothing stops the generation.
        steering: How it is steered.
        sampling: How the next token is chosen.
        stop: Strings that end the text; they are not part of it.
        stop_token_ids: Tokens that end it, in addition to the model's own.
        ignore_eos: Whether to go on after the model's own stop tokens.
        top_logprobs: How many alternatives to report for every scored token.
        prompt_logprobs: Whether to score the prompt's tokens too.
        watch: Tokens whose log-probability at the first new position is reported (for p_y).
        gate: What decides whether it is steered; None steers it always.
        contrast: For `cad` and `adacad`; all log-probabilities are then those of the combined
            logits.
        structure: The form that the answer must have; None: any.
        skip_special_tokens: Whether the text leaves special tokens out.

    Raises:
        RequestError: A value is out of range, or does not go with the others.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int = 64
    min_tokens: int = 0
    steering: Steering = field(default_factory=unsteered)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    watch: tuple[int, ...] = ()
    gate: RequestGate | None = None
    contrast: Contrast | None = None
    structure: Structure | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if not self.prompt_ids or (self.contrast is not None and not self.contrast.prompt_ids):
            raise RequestError("the prompt is empty; expected at least one token", param="prompt")
        least = 0 if self.prompt_logprobs else 1
        if self.max_tokens < least:
            raise RequestError(
                f"max_tokens is {self.max_tokens}; expected at least {least}", param="max_tokens"
            )
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; expected a number from 0 to max_tokens, "
                f"{self.max_tokens}",
                param="min_tokens",
            )
        if len(self.stop) > MAX_STOPS or not all(self.stop):
            raise RequestError(
                f"stop holds {len(self.stop)} strings; expected at most {MAX_STOPS}, "
                "none of them empty",
                param="stop",
            )
        if len(self.stop_token_ids) > MAX_STOPS:
            raise RequestError(
                f"stop_token_ids holds {len(self.stop_token_ids)} tokens; "
                f"expected at most {MAX_STOPS}",
                param="stop_token_ids",
            )
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"logprobs is {self.top_logprobs}; expected a number from 0 to {MAX_TOP_LOGPROBS}",
                param="logprobs",
            )
        if self.gate is not None and self.max_tokens == 0:
            raise RequestError(
                "a gate decides by the first new token, but max_tokens is 0; turn it off"
                " (gate=off)",
                param="steer.gate",
            )
        if self.structure is not None and (self.ignore_eos or self.min_tokens):
            raise RequestError(
                "an answer of a given form ends where the form does; leave out ignore_eos and "
                "min_tokens",
                param="ignore_eos" if self.ignore_eos else "min_tokens",
            )
        if self.structure is not None and (self.stop or self.stop_token_ids):
            raise RequestError(
                "an answer of a given form ends where the form does; leave out stop, stop_sequences"
                " and stop_token_ids",
                param="stop" if self.stop else "stop_token_ids",
            )
        if self.contrast is not None and self.prompt_logprobs:
            raise RequestError(
                "methods cad and adacad score new tokens only; leave out prompt_logprobs (echo)",
                param="steer.method",
            )

    @property
    def n_positions(self) -> int:
        """The positions reserved for each of its rows: its longest prompt and `max_tokens`."""
        return (
            max(len(self.prompt_ids), len(self.contrast.prompt_ids) if self.contrast else 0)
            + self.max_tokens
        )

    def with_seed(self, seed: int | None) -> GenerationRequest:
        """Return this request with another seed; a gate decides once for both."""
        return replace(self, sampling=self.sampling.model_copy(update={"seed": seed}))

    def with_steering(self, steering: Steering) -> GenerationRequest:
        """Return this request with another steering."""
        return replace(self, steering=steering)

    def check_length(self, limit: int | None) -> None:
        """Raise ContextLengthError if prompt and new tokens exceed `limit` (None: no limit)."""
        if limit is None or self.n_positions <= limit:
            return
        n_prompt = self.n_positions - self.max_tokens
        if n_prompt >= limit:
            raise ContextLengthError(
                f"the prompt has {n_prompt} tokens; the context has {limit}: shorten the prompt",
                param="prompt",
            )
        raise ContextLengthError(
            f"the prompt has {n_prompt} tokens and max_tokens is {self.max_tokens}; the context "
            f"has {limit}: shorten the prompt or lower max_tokens",
            param="max_tokens",
        )

    def check_tokens(self, vocabulary_size: int) -> None:
        """Raise RequestError for a token that the model does not have."""
        named = (
            ("prompt", self.prompt_ids),
            ("prompt", self.contrast.prompt_ids if self.contrast else ()),
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.sampling.logit_bias),
            ("watch", self.watch),
        )
        for param, ids in named:
            for token in (min(ids), max(ids)) if ids else ():
                if not 0 <= token < vocabulary_size:
                    raise RequestError(
                        f"{param} names token {token}; the model has tokens 0 to "
                        f"{vocabulary_size - 1}",
                        param=param,
                    )
