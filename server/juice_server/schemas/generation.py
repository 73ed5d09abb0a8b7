"""The fields that every route that generates shares: how to steer, how to sample, when to stop."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from juice.engine import Steer
from juice.engine.request import MAX_STOPS, MAX_TOP_LOGPROBS
from juice.engine.sampling import MAX_BIASES
from juice.engine.steer import SteerMethod, SteerTarget
from juice.head_set.schema import MAX_BETA

FinishReason = Literal["stop", "length"]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
TokenKey = Annotated[int, Field(ge=0, lt=2**31)]  # a key of a JSON object is text
MAX_TOKENS = 10_000_000
MAX_KEYS, MAX_PROMPTS = 100, 1024


def at_most(n: int) -> BeforeValidator:
    """Refuse a list or object of more than n before its items are looked at: each wrong one would cost an error of its own."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > n:
            raise PydanticCustomError("too_long", "expected at most {n} entries, got {got}", {"n": n, "got": len(value)})
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """An object that a client sends; unknown fields are refused, and so are more of them than any body has."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bound_keys(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) > MAX_KEYS:
            raise PydanticCustomError("too_long", "expected at most {n} fields, got {got}", {"n": MAX_KEYS, "got": len(body)})
        return body


class SteerField(Body):
    """`"steer": "context"`, or an object; all but the target optional."""

    target: SteerTarget
    strength: float = Field(default=1.0, ge=0, le=MAX_BETA)
    head_set: str | None = None
    beta_plus: float | None = Field(default=None, ge=0, le=MAX_BETA)
    beta_minus: float | None = Field(default=None, le=0, ge=-MAX_BETA)
    method: SteerMethod = "juice"

    def to_steer(self) -> Steer:
        """Return what the engine is asked for."""
        return Steer(**self.model_dump())


def _from_name(value: Any) -> Any:
    return {"target": value} if isinstance(value, str) else value


def as_list(value: Any) -> Any:
    """Take a single string for a list of one."""
    return [value] if isinstance(value, str) else value


class GenerationFields(Body):
    """How to steer, sample and stop; `options` are those of `SteeredModel.request`."""

    default_max_tokens: ClassVar[int] = 64

    steer: Annotated[SteerField | None, BeforeValidator(_from_name)] = None
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    min_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    temperature: float = Field(default=0.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, le=1_000_000)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]] | None, at_most(MAX_BIASES)] = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63 - 1024)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]] | None, BeforeValidator(as_list), at_most(MAX_STOPS)] = None
    stop_token_ids: Annotated[list[TokenId], at_most(MAX_STOPS)] = []
    ignore_eos: bool = False
    n: int = Field(default=1, ge=1, le=1024)
    stream: bool = False

    def options(self) -> dict[str, Any]:
        """Return the fields that `SteeredModel.request` takes as they are."""
        return {
            "min_tokens": self.min_tokens, "temperature": self.temperature, "top_p": self.top_p, "top_k": max(0, self.top_k),
            "min_p": self.min_p, "repetition_penalty": self.repetition_penalty, "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty, "logit_bias": self.logit_bias or {}, "stop": self.stop,
            "stop_token_ids": tuple(self.stop_token_ids), "ignore_eos": self.ignore_eos,
        }  # fmt: skip


NEARLY_STEER = frozenset({"extra_body", "steering", "target", "head_set", "strength", "beta_plus", "beta_minus"})


class StreamOptions(BaseModel):
    """What a stream carries beside its text."""

    include_usage: bool = False


class OpenAIFields(GenerationFields):
    """OpenAI's defaults; fields of theirs that we do not know are tolerated, those that would change the answer refused."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    not_served: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str | None = None
    temperature: float = Field(default=1.0, ge=0, le=2)
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_changes_meaning(cls, body: Any) -> Any:
        """Refuse a field that is not served, unless its value means that it is not used; null is as good as absent."""
        if not isinstance(body, dict) or len(body) > MAX_KEYS:
            return body  # refused as it is, before every one of its names is looked at
        for name, harmless in cls.not_served.items():
            if body.get(name) is not None and body[name] not in harmless:
                raise PydanticCustomError("not_served", "the field {name} is not served here; leave it out", {"name": name})
        for name in body:
            if name != "steer" and (name in NEARLY_STEER or get_close_matches(name.casefold(), ["steer"], cutoff=0.8)):
                # Tolerated as unknown, it would pass unsteered.
                raise PydanticCustomError("not_served", "the field {name} does not steer; say steer, at the top level", {"name": name})
        return {name: value for name, value in body.items() if value is not None}

    @property
    def include_usage(self) -> bool:
        """Tell whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class Usage(BaseModel):
    """Tokens read and written; a prompt with several choices is read once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage_of(n_prompt_tokens: int, n_new_tokens: int) -> Usage:
    """Return the usage of one HTTP request."""
    return Usage(prompt_tokens=n_prompt_tokens, completion_tokens=n_new_tokens, total_tokens=n_prompt_tokens + n_new_tokens)


Contexts = Annotated[list[str] | None, BeforeValidator(as_list), at_most(MAX_PROMPTS)]
TOP_LOGPROBS = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
