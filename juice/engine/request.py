"""A request: tokens to continue, how to steer and sample, when to stop, and for whom.

Its options are what the caller asked for; `steering`, `gate` and `contrast` are what they mean for
one model and its head sets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from operator import index
from typing import Annotated, Any, Protocol, Self, TypeAlias, TypedDict, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field

from juice.engine.answer import ScoredToken
from juice.engine.sampling_options import SamplingOptions
from juice.engine.steer import GateReport, GivenHeadSet, Steer, Steering, unsteered
from juice.engine.structure import Structure
from juice.errors import ContextLengthError, JuiceError, RequestError
from juice.formula import (
    CONTRASTS,
    ContrastMethod,
    Explain,
    GateMode,
    SteerTarget,
    Target,
    is_contrast,
)
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import GateRule, Signal

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
T = TypeVar("T")
# One value for all prompts, or a list with one value per prompt.
OneOrEach: TypeAlias = T | list[T]


class Running(Protocol):
    """A submitted request."""

    def cancel(self, reason: JuiceError | None = None) -> None:
        """End it soon; its last update is then an error."""


def _as_tuple(value: Any) -> Any:
    return () if value is None else (value,) if isinstance(value, str) else value


class GenerationOptions(SamplingOptions):
    """The way to continue a prompt: each option of `SteeredModel.generate`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    steer: SteerTarget | Steer = Field(
        default="none", description="A target, or a `Steer` with more options."
    )
    strength: float | tuple[float, ...] | None = Field(
        default=None,
        description="Multiplies both betas, 0 to 100, or a schedule of it; None: as `steer` says.",
    )
    head_set: str | GivenHeadSet | None = Field(
        default=None, description="A head set or its name; None: as `steer` says."
    )
    gate: GateMode | None = Field(
        default=None,
        description="`auto` steers only where the head set's gate finds a reason to; `off` always.",
    )
    context: str | None = Field(default=None, description="Text to put before the prompt.")
    without_context: str | tuple[int, ...] | None = Field(
        default=None,
        description="The prompt alone, where it already contains its context; contrasts and gates "
        "toward memory use it.",
    )
    question_at: int | None = Field(
        default=None,
        description="The position of the first token after the context, for `positions: question`.",
    )
    max_tokens: int = Field(default=64, description="The most new tokens.")
    min_tokens: int = Field(
        default=0, description="The fewest new tokens before generation may stop."
    )
    stop: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = Field(
        default=(),
        description="A string or a tuple of strings; generation ends before the first that occurs.",
    )
    stop_token_ids: tuple[int, ...] = Field(
        default=(), description="Tokens that end generation, besides the model's."
    )
    ignore_eos: bool = Field(default=False, description="Do not stop at the model's stop tokens.")
    top_logprobs: int = Field(
        default=0, description="How many alternatives to report for each token, 0 to 20."
    )
    prompt_logprobs: bool = Field(
        default=False, description="Score the prompt's tokens too; `max_tokens` may then be 0."
    )
    watch: tuple[int, ...] = Field(
        default=(), description="Tokens whose log-probability at the first new position to report."
    )
    explain: Explain | None = Field(
        default=None,
        description="`effect` adds to the report what steering and the context changed at the "
        "first new token.",
    )
    structure: Structure | None = Field(
        default=None, description="The form of the answer, such as `Structure.json_schema(...)`."
    )
    skip_special_tokens: bool = Field(
        default=True, description="Leave special tokens out of the text."
    )

    @property
    def as_steer(self) -> Steer:
        """The steering options as one value; raises RequestError where they contradict."""
        given = {"strength": self.strength, "head_set": self.head_set, "gate": self.gate}
        return Steer.of(self.steer, **{k: v for k, v in given.items() if v is not None})


class OptionFields(TypedDict, total=False):
    """The fields of `GenerationOptions` as keywords; `generate` also takes one value a prompt."""

    steer: OneOrEach[SteerTarget | Steer]
    strength: OneOrEach[float | tuple[float, ...] | None]
    head_set: OneOrEach[str | HeadSet | None]
    gate: OneOrEach[GateMode | None]
    context: OneOrEach[str | None]
    without_context: OneOrEach[str | Sequence[int] | None]
    question_at: OneOrEach[int | None]
    max_tokens: OneOrEach[int]
    min_tokens: OneOrEach[int]
    stop: OneOrEach[str | tuple[str, ...] | None]
    stop_token_ids: OneOrEach[tuple[int, ...]]
    ignore_eos: OneOrEach[bool]
    top_logprobs: OneOrEach[int]
    prompt_logprobs: OneOrEach[bool]
    watch: OneOrEach[tuple[int, ...]]
    explain: OneOrEach[Explain | None]
    temperature: OneOrEach[float]
    top_p: OneOrEach[float]
    top_k: OneOrEach[int]
    min_p: OneOrEach[float]
    repetition_penalty: OneOrEach[float]
    presence_penalty: OneOrEach[float]
    frequency_penalty: OneOrEach[float]
    logit_bias: OneOrEach[Mapping[int, float] | None]
    seed: OneOrEach[int | None]
    structure: OneOrEach[Structure | None]
    skip_special_tokens: OneOrEach[bool]


def tokens_of(given: Any, *, param: str = "prompt") -> tuple[int, ...]:
    """Return tokens from any whole numbers: a sequence, an array or a tensor of one dimension.

    Raises RequestError for anything else.
    """
    tokens = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(tokens, Iterable) or isinstance(tokens, str | bytes):
        raise RequestError(
            f"{param} is {given!r}; expected a text, or a list of whole numbers, its tokens",
            param=param,
        )
    tokens = tuple(tokens)
    # By type first: there may be a hundred thousand.
    for wrong in {*map(type, tokens)} - {int}:
        if issubclass(wrong, bool) or not issubclass(wrong, Integral):
            token = next(token for token in tokens if type(token) is wrong)
            raise RequestError(
                f"{param} holds {token!r} among its tokens; expected whole numbers, as `tokenize`"
                " returns them",
                param=param,
            )
    return tuple(map(index, tokens))


@dataclass(frozen=True, eq=False, kw_only=True)
class RequestGate:
    """The gate that decides whether a request is steered; requests that share it share that.

    They are steered where the signal reaches the threshold; `memory` is that of the prompt
    `without_context`.
    """

    signal: Signal
    threshold: float
    without_context: tuple[int, ...] = ()

    def decide(self, prompt_ids: Sequence[int], token: ScoredToken) -> GateReport:
        """Decide by the first new token of the run that the signal is about."""
        value, least = value_of(self.signal, prompt_ids, token), self.threshold
        return GateReport(steers=value >= least, signal=self.signal, value=value, threshold=least)


def value_of(signal: Signal, prompt_ids: Sequence[int], token: ScoredToken) -> float:
    """Return the value of a signal, from the first new token of the run that it is about.

    The token has at least one alternative: the likeliest.
    """
    likeliest, logprob = token.top[0]
    is_new = signal == "copied" and likeliest not in prompt_ids
    return 0.0 if is_new else math.exp(logprob)


def gate_of(
    steer: Steer,
    head_set: HeadSet,
    *,
    chat_template_sha256: str | None,
    without_context: tuple[int, ...] | None,
) -> RequestGate:
    """Return the gate of a request from the one of its head set.

    A plain prompt has no chat template. Raises RequestError where the set has no gate for what the
    request asks for.
    """
    method = steer.method_with(head_set)
    gate = head_set.gate(method)
    if gate is None:
        reason = f"has no gate for method {method!r}; `juice tune` measures one"
    elif (steer.beta_plus, steer.beta_minus) != (None, None) or steer.strength != 1:
        reason = "has a gate for its own betas at strength 1; drop strength and betas"
    elif gate.chat_template_sha256 != chat_template_sha256:
        measured = "in a chat" if gate.chat_template_sha256 else "on plain prompts"
        reason = f"has a gate that was measured {measured}, unlike this prompt; tune in this form"
    elif (rule := _usable(gate.rules, without_context)) is None:
        reason = "has a gate that needs the context apart; give it as `context`"
    else:
        return RequestGate(
            signal=rule.signal,
            threshold=rule.threshold,
            without_context=(without_context or ()) if rule.signal == "memory" else (),
        )
    raise RequestError(
        f"the head set {head_set.name!r} {reason}, or turn the gate off (gate=off)",
        param="steer.gate",
    )


def _usable(rules: Sequence[GateRule], without_context: tuple[int, ...] | None) -> GateRule | None:
    return next((r for r in rules if r.signal != "memory" or without_context is not None), None)


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A contrast: the prompt without its context, whose logits are mixed with those of the prompt.

    Every token is chosen from the mixture, and goes into both rows. docs/method.md, "Contrasts",
    says how each method mixes.
    """

    prompt_ids: tuple[int, ...]
    method: ContrastMethod = "cad"
    target: Target = "context"
    strength: float = 1.0


def contrast_of(steer: Steer, without_context: tuple[int, ...] | None) -> Contrast | None:
    """Return the contrast of a request; None where its method has none, or its strength is 0.

    Raises RequestError where the prompt without its context is not given.
    """
    if not is_contrast(steer.method) or not steer.strength:
        return None
    if without_context is None:
        raise RequestError(
            f"method {steer.method} needs the context separately; give it as `context`",
            param="context",
        )
    assert not isinstance(steer.strength, tuple), "a contrast has one strength"
    assert steer.target in CONTRASTS[steer.method], "checked when it was made"
    return Contrast(
        prompt_ids=without_context,
        method=steer.method,
        target=steer.target,
        strength=steer.strength,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """Tokens to continue, and everything that an engine and a queue must know of them.

    Args:
        prompt_ids: The tokens of the prompt.
        options: The options that the caller gave.
        steering: Its coefficients by head, and the positions at which they are added.
        gate: The gate that decides whether it is steered; None steers it always.
        contrast: For the methods that contrast; all log-probabilities are then those of the mixed
            logits.
        without_context: The tokens of the prompt without its context, which `explain` compares it
            with; none where that is not given apart.
        client: For whom it is; queues are fair to clients.
        priority: Lower ones go first.
        index: Its number among those that its caller submits together; updates carry it.
        arrived: When it was made, on the monotonic clock, in seconds; all its times count from
            there.

    Raises:
        RequestError: A value is out of range, or does not go with the others.
    """

    prompt_ids: tuple[int, ...]
    options: GenerationOptions = field(default_factory=GenerationOptions)
    steering: Steering = field(default_factory=unsteered)
    gate: RequestGate | None = None
    contrast: Contrast | None = None
    without_context: tuple[int, ...] = ()
    client: Hashable = None
    priority: int = 0
    index: int = 0
    arrived: float = field(default_factory=time.monotonic)

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        *,
        steering: Steering | None = None,
        gate: RequestGate | None = None,
        contrast: Contrast | None = None,
        **options: Any,
    ) -> Self:
        """Make a request from tokens and fields of `GenerationOptions`; raises RequestError."""
        return cls(
            prompt_ids=tokens_of(prompt_ids),
            options=GenerationOptions.of(**options),
            steering=steering or unsteered(),
            gate=gate,
            contrast=contrast,
        )

    def __post_init__(self) -> None:
        if not self.prompt_ids or (self.contrast is not None and not self.contrast.prompt_ids):
            raise RequestError("the prompt is empty; expected at least one token", param="prompt")
        self._check_ranges()
        self._check_together()

    def _check_ranges(self) -> None:
        options = self.options
        least = 0 if options.prompt_logprobs else 1
        if options.max_tokens < least:
            raise RequestError(
                f"max_tokens is {options.max_tokens}; expected at least {least}", param="max_tokens"
            )
        if not 0 <= options.min_tokens <= options.max_tokens:
            raise RequestError(
                f"min_tokens is {options.min_tokens}; expected a number from 0 to max_tokens, "
                f"{options.max_tokens}",
                param="min_tokens",
            )
        if len(options.stop) > MAX_STOPS or not all(options.stop):
            raise RequestError(
                f"stop holds {len(options.stop)} strings; expected at most {MAX_STOPS}, "
                "none of them empty",
                param="stop",
            )
        if len(options.stop_token_ids) > MAX_STOPS:
            raise RequestError(
                f"stop_token_ids holds {len(options.stop_token_ids)} tokens; "
                f"expected at most {MAX_STOPS}",
                param="stop_token_ids",
            )
        if not 0 <= options.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"logprobs is {options.top_logprobs}; expected a number from 0 to "
                f"{MAX_TOP_LOGPROBS}",
                param="logprobs",
            )

    def _check_together(self) -> None:
        options = self.options
        if self.gate is not None and options.max_tokens == 0:
            raise RequestError(
                "a gate decides by the first new token, but max_tokens is 0; turn it off"
                " (gate=off)",
                param="steer.gate",
            )
        if options.explain is not None and options.max_tokens == 0:
            raise RequestError(
                "explain is about the first new token, but max_tokens is 0; leave it out",
                param="explain",
            )
        if self.contrast is not None and options.prompt_logprobs:
            raise RequestError(
                f"method {self.contrast.method} scores new tokens only; leave out prompt_logprobs "
                "(echo)",
                param="steer.method",
            )
        if options.structure is None:
            return
        if options.ignore_eos or options.min_tokens:
            raise RequestError(
                "an answer of a given form ends where the form does; leave out ignore_eos and "
                "min_tokens",
                param="ignore_eos" if options.ignore_eos else "min_tokens",
            )
        if options.stop or options.stop_token_ids:
            raise RequestError(
                "an answer of a given form ends where the form does; leave out stop, stop_sequences"
                " and stop_token_ids",
                param="stop" if options.stop else "stop_token_ids",
            )

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of its prompt, and of those without context, or none of them."""
        alone = self.contrast.prompt_ids if self.contrast else ()
        gating = self.gate.without_context if self.gate else ()
        return self.prompt_ids, alone, gating, self.without_context

    @property
    def n_positions(self) -> int:
        """The positions reserved for each of its rows: its longest prompt and `max_tokens`."""
        return max(map(len, self.prompts)) + self.options.max_tokens

    @property
    def n_tokens(self) -> int:
        """The tokens that it may use: its prompt and `max_tokens`."""
        return len(self.prompt_ids) + self.options.max_tokens

    def with_options(self, **options: Any) -> Self:
        """Return this request with other values of its options."""
        return replace(self, options=self.options.model_copy(update=options))

    def with_steering(self, steering: Steering) -> Self:
        """Return this request with another steering."""
        return replace(self, steering=steering)

    def check_length(self, limit: int | None) -> None:
        """Raise ContextLengthError if prompt and new tokens exceed `limit` (None: no limit)."""
        if limit is None or self.n_positions <= limit:
            return
        n_prompt = self.n_positions - self.options.max_tokens
        if n_prompt >= limit:
            raise ContextLengthError(
                f"the prompt has {n_prompt} tokens; the context has {limit}: shorten the prompt",
                param="prompt",
            )
        raise ContextLengthError(
            f"the prompt has {n_prompt} tokens and max_tokens is {self.options.max_tokens}; "
            f"the context has {limit}: shorten the prompt or lower max_tokens",
            param="max_tokens",
        )

    def check_tokens(self, vocabulary_size: int) -> None:
        """Raise RequestError for a token that the model does not have."""
        named = (
            *(("prompt", ids) for ids in self.prompts),
            ("stop_token_ids", self.options.stop_token_ids),
            ("logit_bias", self.options.logit_bias),
            ("watch", self.options.watch),
        )
        for param, given in named:
            ids = tokens_of(given, param=param)
            for token in (min(ids), max(ids)) if ids else ():
                if not 0 <= token < vocabulary_size:
                    raise RequestError(
                        f"{param} names token {token}; the model has tokens 0 to "
                        f"{vocabulary_size - 1}",
                        param=param,
                    )


def numbered(requests: Sequence[Request]) -> list[Request]:
    """Return requests that are submitted together, numbered in this order."""
    return [replace(request, index=i) for i, request in enumerate(requests)]
