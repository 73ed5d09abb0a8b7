"""How a request chooses its tokens, and the ranges of its options.

In this order: a bias for single tokens; penalties for tokens that occurred before; division by the
temperature; the cuts to the `top_k` likeliest tokens, to the smallest set that holds `top_p` of the
mass, and to tokens with at least `min_p` of the likeliest one's probability.

    repetition   logit / penalty if logit > 0 else logit * penalty   tokens of prompt and answer
    presence     logit - penalty                                     tokens of the answer
    frequency    logit - penalty * occurrences                       tokens of the answer
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from juice.options.base import Options

MAX_BIASES = 1024
Bias = Annotated[float, Field(ge=-100, le=100)]


class SamplingOptions(Options):
    """How the next token is chosen; the defaults take the likeliest one."""

    temperature: float = Field(default=0.0, ge=0, le=2, description="0 takes the likeliest token.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample from the smallest set with this mass."
    )
    top_k: int = Field(
        default=0,
        ge=-1,
        le=1_000_000,
        description="Sample from the k likeliest tokens; 0 or -1 for all.",
    )
    min_p: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Drop tokens below this share of the likeliest one's probability.",
    )
    repetition_penalty: float = Field(
        default=1.0,
        ge=0.01,
        le=100,
        description="Divides the logits of tokens that occurred before; 1 for none.",
    )
    presence_penalty: float = Field(
        default=0.0,
        ge=-2,
        le=2,
        description="Subtracted from the logits of tokens that are already in the answer.",
    )
    frequency_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="The same, once for each time that they occur."
    )
    logit_bias: dict[int, Bias] = Field(
        default_factory=dict,
        max_length=MAX_BIASES,
        description="Added to the logits of single tokens, by id.",
    )
    seed: int | None = Field(
        default=None, ge=-(2**63), lt=2**63, description="Seed of the sampling."
    )

    @property
    def changes_logits(self) -> bool:
        """Whether a bias or a penalty changes the logits before the choice."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.logit_bias)
