"""The fields that all generating routes share: how to steer, how to sample, when to stop."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from juice.engine import Steer
from juice.engine.request import MAX_STOPS, MAX_TOP_LOGPROBS
from juice.options import MAX_BIASES, SamplingOptions
from juice.options.sampling import Bias
from juice_server.keys import MAX_PRIORITY
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


class Body(BaseModel):
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
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    min_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    logit_bias: Annotated[dict[TokenKey, Bias] | None, at_most(MAX_BIASES)] = None  # type: ignore[assignment]
    seed: int | None = SEED
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None,
        BeforeValidator(as_list),
        at_most(MAX_STOPS),
    ] = None
    stop_token_ids: Annotated[list[TokenId], at_most(MAX_STOPS)] = []
    ignore_eos: bool = False
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    priority: int | None = Field(default=None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    stream: bool = False

    def options(self) -> dict[str, Any]:
        """Return the fields that `SteeredModel.request` takes unchanged."""
        return {
            **{name: getattr(self, name) for name in SamplingOptions.model_fields},
            "min_tokens": self.min_tokens,
            "stop": tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "structure": self.structure,
        }


NEARLY_STEER = frozenset(
    {"extra_body", "steering", "target", "head_set", "strength", "beta_plus", "beta_minus"}
)


class StreamOptions(BaseModel):
    """What a stream carries in addition to its text."""

    include_usage: bool = False


class OpenAIFields(GenerationFields):
    """OpenAI's fields and defaults.

    Unknown fields are tolerated; those that would change the answer are refused.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    not_served: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str | None = None
    temperature: float = Field(default=1.0, ge=0, le=2)
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_changes_meaning(cls, body: Any) -> Any:
        """Refuse a field that is not served, unless its value means unused; null means absent."""
        if not isinstance(body, dict) or len(body) > MAX_KEYS:
            return body  # too many names to check: `Body` refuses them
        for name, harmless in cls.not_served.items():
            if body.get(name) is not None and body[name] not in harmless:
                raise PydanticCustomError(
                    "not_served",
                    "the field {name} is not served here; leave it out",
                    {"name": name},
                )
        for name in body:
            if name != "steer" and (
                name in NEARLY_STEER or get_close_matches(name.casefold(), ["steer"], cutoff=0.8)
            ):
                # Tolerated as unknown, it would pass unsteered.
                raise PydanticCustomError(
                    "not_served",
                    "the field {name} does not steer; use steer, at the top level",
                    {"name": name},
                )
        return {name: value for name, value in body.items() if value is not None}

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class Usage(BaseModel):
    """Prompt and generated tokens; a prompt with several choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage_of(n_prompt_tokens: int, n_new_tokens: int) -> Usage:
    """Return the usage of one HTTP request."""
    return Usage(
        prompt_tokens=n_prompt_tokens,
        completion_tokens=n_new_tokens,
        total_tokens=n_prompt_tokens + n_new_tokens,
    )


Contexts = Annotated[list[str] | None, BeforeValidator(as_list), at_most(MAX_PROMPTS)]
TOP_LOGPROBS = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
