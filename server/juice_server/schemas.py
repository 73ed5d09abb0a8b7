"""The bodies of requests and answers. Unknown keys are refused: a misspelt `steer` must never pass unsteered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from juice.engine import Steer

SteerTarget = Literal["none", "context", "parametric"]


class SteerField(BaseModel):
    """`"steer": "context"`, or an object; all but the target optional."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    target: SteerTarget
    strength: float = Field(default=1.0, ge=0, le=100)
    head_set: str | None = None
    beta_plus: float | None = Field(default=None, ge=0, le=100)
    beta_minus: float | None = Field(default=None, le=0, ge=-100)
    method: Literal["juice", "june"] = "juice"

    def to_steer(self) -> Steer:
        """Return what the engine is asked for."""
        return Steer(**self.model_dump())


def _from_name(value: Any) -> Any:
    return {"target": value} if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class GenerateRequest(BaseModel):
    """The body of POST /generate."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    prompt: Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1, max_length=32)]
    steer: Annotated[SteerField, BeforeValidator(_from_name)] = SteerField(target="none")
    max_tokens: int = Field(default=64, ge=1, le=1_000_000)
    temperature: float = Field(default=0.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, le=1_000_000)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str], BeforeValidator(_as_list), Field(max_length=16)] = []
    ignore_eos: bool = False


class Steering(BaseModel):
    """What was applied to a request."""

    applied: bool
    target: SteerTarget
    head_set: str | None
    beta_plus: float
    beta_minus: float
    strength: float
    method: Literal["juice", "june"]
    n_heads: int


class Usage(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Timing(BaseModel):
    """Seconds from the request's arrival at the engine to its answer."""

    total_s: float


class Choice(BaseModel):
    """One of several texts."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"]


class GenerateResponse(BaseModel):
    """The answer of POST /generate; `text` is the first choice, `choices` is there when there is more than one."""

    id: str
    model: str
    text: str
    finish_reason: Literal["stop", "length"]
    steering: Steering
    usage: Usage
    timing: Timing
    choices: list[Choice] | None = None
