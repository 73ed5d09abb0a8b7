"""How heads are looked for: the options, without PyTorch, so that `--help` need not wait for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, Self, TypedDict

from pydantic import Field, field_validator, model_validator

from juice.engine.sampling_options import Options
from juice.errors import UsageError
from juice.formula import METHODS, Method, Target

ALPHAS_PLUS = (1.0, 3.0, 5.0, 10.0, 30.0)
ALPHAS_MINUS = (-1.0, -2.0, -5.0)
N_PROBED = 4
N_DIFFERENTIATED, N_LEARNED_FROM = 16, 72
LEARNED_SHARE = 0.6  # of the examples, where there are fewer
# The numbers of heads of each sign that compete where none is asked for.
TOP_KS = (3, 5, 10)
Way = Literal["auto", "attribution", "learned", "probe"]
Protected = Literal["unknown", "clean", "true", "irrelevant"]
PROTECTED: tuple[Protected, ...] = ("unknown", "clean", "true", "irrelevant")
MAX_DIVERGENCE, MORE_DIVERGENCE = 0.05, 0.1  # nats a token; where little is won within the first
TOP_K = "expected at least 1 (5 up to about 3B parameters, 10 above)"


# The ways that take an option; the others refuse it.
TAKEN_BY: dict[str, tuple[Way, ...]] = {
    "alphas_plus": ("probe",),
    "alphas_minus": ("probe",),
    "top_k": ("auto", "attribution", "probe"),
    "penalty": ("auto", "learned"),
    "budget": ("auto", "learned"),
    "tune": ("attribution", "probe"),
    "june": ("auto", "attribution", "learned", "probe"),
}

DURATION, UNITS = re.compile(r"(\d+(?:\.\d+)?)([smh])"), {"s": 1, "m": 60, "h": 3600}


class IdentificationFields(TypedDict, total=False):
    """The fields of `IdentificationOptions` but for the target, for editors and type checkers."""

    name: str | None
    method: Way
    n_examples: int | None
    relation: str | None
    seed: int
    top_k: int | None
    alphas_plus: Sequence[float]
    alphas_minus: Sequence[float]
    penalty: float | None
    max_divergence: float | None
    budget: float | str | None
    protect: Sequence[Protected]
    accepted_loss: float
    tune: bool
    june: bool


class IdentificationOptions(Options):
    """How heads are looked for, chosen and tuned.

    The options of `juice identify`, `juice.identify` and the evaluation, each defined here only.

    Raises:
        UsageError: A value is out of range, or a name is given for two targets.
    """

    target: Literal["parametric", "context", "both"] = Field(
        default="both", description="What the heads push toward."
    )
    name: str | None = Field(
        default=None, description="Name of the head set, of one target; else the target."
    )
    method: Way = Field(
        default="auto",
        description="attribution (by gradients), learned (a beta for each head), auto (whichever "
        "validates best, in one run or two), or probe (the paper's way, with its alphas and grid).",
    )
    n_examples: int | None = Field(
        default=None,
        description="Examples drawn to find heads on; else 72, at most 0.6 of them, 16 for "
        "attribution, at most half of them, and 4 for probes.",
    )
    relation: str | None = Field(default=None, description="Draw examples of this relation only.")
    seed: int = Field(default=0, description="Seed of what is drawn.")
    top_k: int | None = Field(
        default=None,
        description="Heads of each sign; else 3, 5 and 10 compete; 5 for probes. Not for learned.",
    )
    alphas_plus: tuple[float, ...] = Field(
        default=ALPHAS_PLUS, description="Probing scales of the + heads (probe)."
    )
    alphas_minus: tuple[float, ...] = Field(
        default=ALPHAS_MINUS, description="The same of the - heads; write it with `=`."
    )
    penalty: float | None = Field(
        default=None,
        ge=0,
        description="What a learned beta of 1 costs, in nats; else 0.01. Fewer heads above "
        "(auto, learned).",
    )
    max_divergence: float | None = Field(
        default=None,
        gt=0,
        description="How far ordinary text, and prompts that leave open what is said, may diverge "
        "from the unsteered, in nats a token; else 0.05, or 0.1 where learned betas win little "
        "within that.",
    )
    budget: str | None = Field(
        default=None,
        description="Time after which the best so far is taken, such as 90s, 5m or 1h "
        "(auto, learned).",
    )
    protect: tuple[Protected, ...] = Field(
        default=PROTECTED,
        description="What steering is kept from breaking: unknown (prompts whose context is all "
        "there is), clean (prompts without one), true (whose context is right), irrelevant (whose "
        "context is about something else), or none.",
    )
    accepted_loss: float = Field(
        default=0.1, ge=0, le=1, description="The share of these that may break at no cost."
    )
    tune: bool = Field(default=True, description="Tune the betas (attribution, probe).")
    june: bool = Field(
        default=False,
        description="Also tune the betas of the single run (JuNe); auto does so anyway.",
    )

    @field_validator("budget", mode="before")
    @classmethod
    def _is_a_time(cls, given: Any) -> Any:
        text = f"{float(given)}s" if isinstance(given, int | float) else given
        found = DURATION.fullmatch(text) if isinstance(text, str) else None
        if text is not None and not (found and float(found[1])):
            raise UsageError(f"budget is {given!r}; expected a time such as 90s, 5m or 1h")
        return text

    @field_validator("protect", mode="before")
    @classmethod
    def _kinds(cls, given: Any) -> Any:
        kinds = given.split(",") if isinstance(given, str) else given
        kinds = () if list(kinds) == ["none"] else tuple(kinds)
        for kind in kinds:
            if kind not in PROTECTED:
                raise UsageError(f"protect names {kind!r}; expected {' or '.join(PROTECTED)}")
        return kinds

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k is {self.top_k}; {TOP_K}")
        if not self.alphas_plus or min(self.alphas_plus) <= 0:
            raise UsageError(
                f"alphas_plus is {list(self.alphas_plus)}; "
                "expected numbers above 0, such as 1,3,5,10,30"
            )
        if not self.alphas_minus or max(self.alphas_minus) >= 0:
            raise UsageError(
                f"alphas_minus is {list(self.alphas_minus)}; "
                "expected numbers below 0, such as -1,-2,-5"
            )
        if self.name is not None and self.target == "both":
            raise UsageError(
                "--name names one head set; give --target parametric or --target context with it"
            )
        for name in self.changed(*TAKEN_BY):
            if self.method not in TAKEN_BY[name]:
                raise UsageError(
                    f"{name} says nothing to the method {self.method}; leave it out, or take "
                    f"{' or '.join(TAKEN_BY[name])}"
                )
        return self

    def but(self, **changes: Any) -> Self:
        """Return these options with some changed."""
        return self.of(self, **changes)

    @property
    def allowed(self) -> float:
        """How far what needs no steering may diverge, in nats, unless little is won within."""
        return MAX_DIVERGENCE if self.max_divergence is None else self.max_divergence

    @property
    def names(self) -> dict[Target, str]:
        """The name of the head set of each target that is asked for."""
        targets: tuple[Target, ...] = (
            ("parametric", "context") if self.target == "both" else (self.target,)
        )
        return {target: self.name or target for target in targets}

    @property
    def seconds(self) -> float | None:
        """The budget in seconds."""
        found = DURATION.fullmatch(self.budget or "")
        return float(found[1]) * UNITS[found[2]] if found else None

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods whose betas are tuned; the first chooses the heads."""
        return METHODS if self.june else ("juice",)

    @property
    def top_ks(self) -> tuple[int, ...]:
        """The numbers of heads of each sign to try."""
        if self.top_k is not None:
            return (self.top_k,)
        return (5,) if self.method == "probe" else TOP_KS

    def n_wanted(self, n_usable: int) -> int:
        """Return the number of examples to draw from the usable ones."""
        if self.n_examples is not None:
            return self.n_examples
        if self.method == "probe":
            return N_PROBED
        if self.method == "attribution":
            return min(N_DIFFERENTIATED, max(1, n_usable // 2))
        return min(N_LEARNED_FROM, max(1, round(LEARNED_SHARE * n_usable)))
