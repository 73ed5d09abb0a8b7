"""The sampling options, each once with its range, and what all options share.

Tokens are chosen in this order: a bias for single tokens; penalties for tokens that occurred
before; division by the temperature; the cuts to the `top_k` likeliest tokens, to the smallest set
that holds `top_p` of the mass, and to tokens with at least `min_p` of the likeliest one's
probability.

    repetition   logit / penalty if logit > 0 else logit * penalty   tokens of prompt and answer
    presence     logit - penalty                                     tokens of the answer
    frequency    logit - penalty * occurrences                       tokens of the answer

Python, the commands and the server take the same options; those of a request that are not about
sampling are in `juice.engine.request`.
"""

from __future__ import annotations

from reprlib import repr as shortened
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from juice.errors import RequestError, first_problem


class Options(BaseModel):
    """Values with ranges; unknown names are refused. Python code makes them with `of`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    @classmethod
    def of(cls, options: Self | None = None, /, **values: Any) -> Self:
        """Return the options with these values, the others as in `options`, or by default.

        Raises RequestError, which names the first wrong one.
        """
        if options is not None and not values:
            return options
        try:
            return cls(**{**dict(options or ()), **values})
        except ValidationError as error:
            path, problem = first_problem(error)
            name = path.partition(".")[0]
            raise RequestError(
                f"{path} is {shortened(error.errors()[0]['input'])}: {problem}", param=name
            ) from error

    def changed(self, *names: str) -> list[str]:
        """Return the options among these that are not at their defaults."""
        return [
            name for name in names if getattr(self, name) != type(self).model_fields[name].default
        ]


MAX_BIASES = 1024
Bias = Annotated[float, Field(ge=-100, le=100)]


class SamplingOptions(Options):
    """The choice of the next token; the defaults take the likeliest one.

    Numbers are numbers: neither texts nor True.
    """

    temperature: float = Field(
        strict=True, default=0.0, ge=0, le=2, description="0 takes the likeliest token."
    )
    top_p: float = Field(
        strict=True,
        default=1.0,
        gt=0,
        le=1,
        description="Sample from the smallest set with this mass.",
    )
    top_k: int = Field(
        strict=True,
        default=0,
        ge=-1,
        le=1_000_000,
        description="Sample from the k likeliest tokens; 0 or -1 for all.",
    )
    min_p: float = Field(
        strict=True,
        default=0.0,
        ge=0,
        le=1,
        description="Drop tokens below this share of the likeliest one's probability.",
    )
    repetition_penalty: float = Field(
        strict=True,
        default=1.0,
        ge=0.01,
        le=100,
        description="Divides the logits of tokens that occurred before; 1 for none.",
    )
    presence_penalty: float = Field(
        strict=True,
        default=0.0,
        ge=-2,
        le=2,
        description="Subtracted from the logits of tokens that are already in the answer.",
    )
    frequency_penalty: float = Field(
        strict=True,
        default=0.0,
        ge=-2,
        le=2,
        description="The same, once for each time that they occur.",
    )
    logit_bias: Annotated[
        dict[int, Bias], BeforeValidator(lambda given: {} if given is None else given)
    ] = Field(
        default_factory=dict,
        max_length=MAX_BIASES,
        description="Added to the logits of single tokens, by id.",
    )
    seed: int | None = Field(
        strict=True, default=None, ge=-(2**63), lt=2**63, description="Seed of the sampling."
    )

    @property
    def changes_logits(self) -> bool:
        """Whether a bias or a penalty changes the logits before the choice."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.logit_bias)
