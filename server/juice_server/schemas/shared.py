"""The fields that all generating routes share: how to steer, how to sample, when to stop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from juice.engine import Steer
from juice.engine.request import MAX_STOPS, MAX_TOP_LOGPROBS
from juice.options import MAX_BIASES, SamplingOptions
from juice.options.sampling import Bias
from juice_server.keys import MAX_PRIORITY
from juice_server.schemas.documented import Documented
from juice_server.schemas.elsewhere import ELSEWHERE, Elsewhere
from juice_server.schemas.structured import StructureFields

TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
TokenKey = Annotated[int, Field(ge=0, lt=2**31)]  # a key of a JSON object is text
MAX_TOKENS = 10_000_000
MAX_KEYS, MAX_PROMPTS, MAX_CHOICES = 100, 1024, 1024
# Choice i of n uses seed + i.
SEED = Field(default=None, ge=-(2**63), lt=2**63 - MAX_CHOICES)


def at_most(n: int) -> BeforeValidator:
    """Refuse a list or object of more than n entries before they are checked.

    Each wrong entry would otherwise add an error of its own.
    """

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > n:
            raise PydanticCustomError(
                "too_long", "expected at most {n} entries, got {got}", {"n": n, "got": len(value)}
            )
        return value

    return BeforeValidator(check)


class Body(Documented):
    """An object that a client sends; unknown fields are refused, and so are too many fields."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bound_keys(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) > MAX_KEYS:
            raise PydanticCustomError(
                "too_long",
                "expected at most {n} fields, got {got}",
                {"n": MAX_KEYS, "got": len(body)},
            )
        return body


def _from_name(value: Any) -> Any:
    return {"target": value} if isinstance(value, str) else value


def as_list(value: Any) -> Any:
    """Turn a single string into a list of one."""
    return [value] if isinstance(value, str) else value


SteerField = Annotated[Steer | None, BeforeValidator(_from_name), at_most(MAX_KEYS)]


class GenerationFields(StructureFields, SamplingOptions, Body):
    """How to steer, sample and stop; the ranges of sampling are those of `SamplingOptions`."""

    model_config = ConfigDict(frozen=False)

    default_max_tokens: ClassVar[int] = 64

    steer: SteerField = None
    """How to steer: a target (`none`, `context`, `parametric`), or an object with more."""
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    """The most new tokens."""
    min_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    """The fewest new tokens before the answer may end."""
    logit_bias: Annotated[dict[TokenKey, Bias] | None, at_most(MAX_BIASES)] = None  # type: ignore[assignment]
    """Added to the logits of single tokens, by id, from -100 to 100."""
    seed: int | None = SEED
    """Seed of the sampling; the same request with the same seed gives the same tokens."""
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None,
        BeforeValidator(as_list),
        at_most(MAX_STOPS),
    ] = None
    """A string or several; the answer ends before the first that occurs."""
    stop_token_ids: Annotated[list[TokenId], at_most(MAX_STOPS)] = Field(default_factory=list)
    """Tokens that end the answer, besides the model's own."""
    ignore_eos: bool = False
    """Do not end at the model's own stop tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    """Answers of each prompt."""
    priority: int | None = Field(default=None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Lower numbers go first; at least what the key allows."""
    stream: bool = False
    """Send the answer as server-sent events while it is made."""

    def options(self) -> dict[str, Any]:
        """Return the fields that `SteeredModel.request` takes unchanged."""
        return {
            **{name: getattr(self, name) for name in SamplingOptions.model_fields},
            "min_tokens": self.min_tokens,
            "stop": tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "structure": self.structure,
            "skip_special_tokens": self.skip_special_tokens,
        }


def _unwrapped(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with `steer` at the top level, which clients of vLLM send in `vllm_xargs`."""
    others = body.get("vllm_xargs")
    if others is None:
        return body
    if not isinstance(others, dict) or others.keys() - {"steer"} or body.get("steer") is not None:
        raise PydanticCustomError(
            "not_served",
            "expected vllm_xargs with nothing but steer, and no other steer",
            {"name": "vllm_xargs"},
        )
    asked = others.get("steer")
    if isinstance(asked, str) and asked.lstrip().startswith("{"):  # as they hold no objects
        try:
            asked = json.loads(asked)
        except ValueError as error:
            problem = {"name": "vllm_xargs", "error": str(error)}
            raise PydanticCustomError(
                "not_served", "vllm_xargs.steer is not JSON: {error}", problem
            ) from None
    return {**{name: own for name, own in body.items() if name != "vllm_xargs"}, "steer": asked}


# The fields of `steer` itself, and what stands for it elsewhere.
NEARLY_STEER = frozenset(
    {"extra_body", "steering", "target", "head_set", "head_sets", "strength", "method", "gate"}
    | {"positions", "beta", "beta_plus", "beta_minus"}
)


class StreamOptions(Documented):
    """What a stream carries in addition to its text."""

    include_usage: bool = False
    """Whether the stream ends with the usage."""
    continuous_usage_stats: Literal[False] = False
    """The usage comes at the end alone, by `include_usage`."""


class OpenAIFields(GenerationFields):
    """OpenAI's fields and defaults.

    Unknown fields are tolerated; those that would change the answer are refused.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    # Beside those of `ELSEWHERE`.
    not_served: ClassVar[Mapping[str, Elsewhere]] = {}

    model: str | None = None
    """The name of the model; `NAME:context` and `NAME:parametric` steer."""
    temperature: float = Field(default=1.0, ge=0, le=2)
    """0 takes the likeliest token."""
    stream_options: StreamOptions | None = None
    """What a stream carries besides."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_changes_meaning(cls, body: Any) -> Any:
        """Refuse a field that is not served, unless its value means unused; null means absent."""
        if not isinstance(body, dict) or len(body) > MAX_KEYS:
            return body  # too many names to check: `Body` refuses them
        for name, value in body.items():
            found = cls.not_served.get(name)
            if found is None and name not in cls.model_fields:
                found = ELSEWHERE.get(name)
            if found is not None and not found.is_unused(value):
                raise PydanticCustomError(
                    "not_served",
                    "the field {name} is not served here; {instead}",
                    {"name": name, "instead": found.instead},
                )
            if (
                name != "steer"
                and value is not None
                and (
                    name in NEARLY_STEER
                    or get_close_matches(name.casefold(), ["steer"], cutoff=0.8)
                )
            ):
                # Tolerated as unknown, it would pass unsteered.
                raise PydanticCustomError(
                    "not_served",
                    "the field {name} does not steer; use steer, at the top level",
                    {"name": name},
                )
        return {name: value for name, value in _unwrapped(body).items() if value is not None}

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class Usage(Documented):
    """Prompt and generated tokens; a prompt with several choices counts once."""

    prompt_tokens: int
    """Tokens of the prompts."""
    completion_tokens: int
    """Tokens of the answers, stop tokens included."""
    total_tokens: int
    """Both."""


def usage_of(n_prompt_tokens: int, n_new_tokens: int) -> Usage:
    """Return the usage of one HTTP request."""
    return Usage(
        prompt_tokens=n_prompt_tokens,
        completion_tokens=n_new_tokens,
        total_tokens=n_prompt_tokens + n_new_tokens,
    )


Contexts = Annotated[list[str] | None, BeforeValidator(as_list), at_most(MAX_PROMPTS)]
TOP_LOGPROBS = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
