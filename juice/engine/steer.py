"""Steering, from what is asked to what was done: `Steer`, `Steering` and `SteeringReport`.

A `Steer` is a request's wish; `Steering` is its meaning for one model, resolved against a head set:
coefficients by layer and head. A request without any takes the unsteered path. The hooks that
change z are in `juice.model.steering_hooks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator, ConfigDict, Field, GetPydanticSchema, Strict
from pydantic.json_schema import SkipJsonSchema
from pydantic_core.core_schema import is_instance_schema

from juice.errors import RequestError
from juice.formula import (
    CONTRASTS,
    GATE_MODES,
    NAMED_POSITIONS,
    STEER_METHODS,
    STEER_TARGETS,
    ContrastMethod,
    GateMode,
    Method,
    NamedPositions,
    SteerMethod,
    SteerTarget,
    is_contrast,
    scales_heads,
)
from juice.head_set.head_set import HeadSet
from juice.head_set.inline import InlineHeads, ScaledHead, heads_of, inline_heads, scaled_heads_of
from juice.head_set.schema import (
    RANGES,
    HeadLists,
    Signal,
    Spread,
    check_scale,
    check_within,
)

# A head set as an object, which only Python can give; JSON names one.
GivenHeadSet = Annotated[
    HeadSet, GetPydanticSchema(lambda _source, _handler: is_instance_schema(HeadSet))
]
# Options of methods that scale heads, and the values that change nothing.
HEADS_ONLY = (
    "head_set", "heads", "coefficients", "beta_plus", "beta_minus", "gate", "positions",
)  # fmt: skip
UNUSED = (None, "off", "all")
MAX_SCHEDULE = 64


def _within(name: str) -> Any:
    """Return the field that shows a range in the JSON schema; `Steer` itself checks it."""
    low, high = RANGES[name]
    return Field(json_schema_extra={"minimum": low, "maximum": high})


Number = Annotated[float, Strict()]  # neither a text nor True
Strength = Annotated[Number, _within("strength")]
Schedule = Annotated[tuple[Strength, ...], Field(min_length=1, max_length=MAX_SCHEDULE)]
GivenHeads = Annotated[
    HeadLists | SkipJsonSchema[Mapping[str, Sequence[Sequence[int]]]] | None,
    BeforeValidator(heads_of),
]
GivenCoefficients = Annotated[
    tuple[ScaledHead, ...] | SkipJsonSchema[Sequence[tuple[int, int, float]]] | None,
    BeforeValidator(scaled_heads_of),
]


@dataclass(frozen=True, kw_only=True)
class FirstGenerated:
    """The first generated tokens, as the positions that are steered.

    Args:
        first_n_generated: The number of them.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    first_n_generated: Annotated[int, Strict(), Field(json_schema_extra={"minimum": 1})]


Positions = NamedPositions | FirstGenerated


def _strength_of(given: Any) -> Any:
    """Return a strength, or the tuple of a schedule; raises RequestError."""
    is_schedule = isinstance(given, Sequence) and not isinstance(given, str)
    strengths = tuple(given) if is_schedule else (given,)
    if not 1 <= len(strengths) <= MAX_SCHEDULE:
        raise RequestError(
            f"strength lists {len(strengths)} numbers; expected 1 to {MAX_SCHEDULE}",
            param="steer.strength",
        )
    for strength in strengths:
        check_scale("strength", strength)
    return strengths if is_schedule else given


def _positions_of(given: Any) -> Positions:
    """Return the positions that JSON or Python gives; raises RequestError."""
    found = given
    if isinstance(given, Mapping) and given.keys() == {"first_n_generated"}:
        found = FirstGenerated(first_n_generated=given["first_n_generated"])
    if isinstance(found, FirstGenerated):
        n = found.first_n_generated
        if isinstance(n, int) and not isinstance(n, bool) and n > 0:
            return found
    elif isinstance(found, str) and found in NAMED_POSITIONS:
        return found
    raise RequestError(
        f"positions is {given!r}; expected {', '.join(NAMED_POSITIONS)} or "
        '{"first_n_generated": n} with n at least 1',
        param="steer.positions",
    )


@dataclass(frozen=True, kw_only=True)
class Steer:
    """The steering that a request asks for.

    Args:
        target: What wins a conflict: `context`, `parametric`, or `none` for no steering. It may be
            left out where `coefficients` are given.
        strength: Multiplies both betas, 0 to 100; 1 is as tuned. Several are a schedule: the first
            holds for the prompt, which decides the first new token, the next ones for each new
            token in turn, and the last for all that follow. It is the weight of a
            contrast, at most 1 for `ckplug`.
        head_set: A head set, or the name of one; without it, the set named like the target.
        heads: The + and - heads themselves, each as (layer, head), in place of a head set; they
            need `beta_plus` and `beta_minus`.
        coefficients: The coefficient of each head, as (layer, head, coefficient), each -100 to 100,
            in place of a head set.
        beta_plus: Scale of the + heads instead of the tuned one, 0 to 100.
        beta_minus: Scale of the - heads instead of the tuned one, -100 to 0.
        method: `juice` (the dual run), `june` (the single run), or a contrast with the prompt
            without its context: `cad`, `adacad` or `cocoa` toward the context, `grd` toward memory,
            `ckplug` toward either; without it, the head set's own.
        gate: `auto` steers only where the head set's gate finds a reason to, `off` always; without
            it, as the server is set, else always.
        positions: `all`; `question` to steer only what comes after the context, which is then
            given apart, in a chat the last user's turn and what follows; `last` for the prompt's
            last token and what follows; `generated` for the new tokens alone; or
            `FirstGenerated(first_n_generated=n)` for the first n of these.

    Raises:
        RequestError: A value is out of range, or does not go with the others.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    target: SteerTarget | None = None
    strength: Annotated[Strength | Schedule, BeforeValidator(_strength_of)] = 1.0
    head_set: str | SkipJsonSchema[GivenHeadSet] | None = None
    heads: GivenHeads = None
    coefficients: GivenCoefficients = None
    beta_plus: Annotated[Number | None, _within("beta_plus")] = None
    beta_minus: Annotated[Number | None, _within("beta_minus")] = None
    method: SteerMethod | None = None
    gate: GateMode | None = None
    positions: Annotated[Positions, BeforeValidator(_positions_of)] = "all"

    def __post_init__(self) -> None:
        for name, read in (
            ("heads", heads_of),
            ("coefficients", scaled_heads_of),
            ("strength", _strength_of),
            ("positions", _positions_of),
        ):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, read(given))
        if self.target is None and self.coefficients is None:
            raise RequestError(
                "steer has no target; name one: context or parametric", param="steer.target"
            )
        for name, value, known in (
            ("steer", self.target, (*STEER_TARGETS, None)),
            ("method", self.method, (*STEER_METHODS, None)),
            ("gate", self.gate, (*GATE_MODES, None)),
        ):
            if value not in known:
                raise RequestError(
                    f"{name} is {value!r}; expected one of {', '.join(filter(None, known))}",
                    param="steer" if name == "steer" else f"steer.{name}",
                )
        unused = next((n for n in HEADS_ONLY if getattr(self, n) not in UNUSED), None)
        if self.target == "none" and unused:
            raise RequestError(
                f"{unused} is given, but steer is none; name a target: context or parametric",
                param="steer.target",
            )
        if is_contrast(self.method):
            self._check_contrast(self.method, unused)
        for name in RANGES.keys() - {"strength"}:
            check_scale(name, getattr(self, name))
        self._check_inline()
        if self.gate == "auto" and (reason := self.beyond_gates):
            raise RequestError(
                f"gate is auto, but {reason}; a gate holds for a head set's own betas at all "
                "positions: turn it off (gate=off)",
                param="steer.gate",
            )

    def _check_contrast(self, method: ContrastMethod, unused: str | None) -> None:
        targets = CONTRASTS[method]
        if self.target not in targets:
            raise RequestError(
                f"method {method} steers toward {' or '.join(targets)} only; steer is "
                f"{self.target}: choose steer={targets[0]}, or method juice or june",
                param="steer.method",
            )
        if unused:
            raise RequestError(
                f"{unused} is given, but method {method} uses no heads; drop it",
                param=f"steer.{unused}",
            )
        if isinstance(self.strength, tuple):
            raise RequestError(
                f"strength is a schedule, but method {method} has one weight; give one number",
                param="steer.strength",
            )
        if method == "ckplug" and self.strength > 1:
            raise RequestError(
                f"strength is {self.strength:g}; expected a number from 0 to 1 for method ckplug, "
                "where 1 is all that it can do",
                param="steer.strength",
            )

    def _check_inline(self) -> None:
        ways = [n for n in ("head_set", "heads", "coefficients") if getattr(self, n) is not None]
        if len(ways) > 1:
            raise RequestError(
                f"{ways[0]} and {ways[1]} are given; each says which heads are scaled: keep one",
                param=f"steer.{ways[1]}",
            )
        for sign in ("plus", "minus"):
            beta = getattr(self, f"beta_{sign}")
            if self.coefficients is not None and beta is not None:
                raise RequestError(
                    f"beta_{sign} is given, but coefficients have a scale for each head; drop it",
                    param=f"steer.beta_{sign}",
                )
            if isinstance(self.heads, HeadLists) and getattr(self.heads, sign) and beta is None:
                raise RequestError(
                    f"heads has {sign} heads, but no beta_{sign}; give it",
                    param=f"steer.beta_{sign}",
                )

    @classmethod
    def of(cls, steer: SteerTarget | Steer, **others: Any) -> Steer:
        """Return a target, or a steer, with other options; raises RequestError."""
        return replace(steer, **others) if isinstance(steer, Steer) else cls(target=steer, **others)

    @property
    def uses_heads(self) -> bool:
        """Whether heads are scaled."""
        return self.target != "none" and self.method not in CONTRASTS

    @property
    def inline(self) -> InlineHeads | None:
        """The heads that are given in place of a head set."""
        if self.heads is None and self.coefficients is None:
            return None
        assert isinstance(self.heads, HeadLists | None), "read when it was made"
        return inline_heads(self.heads, self.coefficients, self.beta_plus, self.beta_minus)

    @property
    def beyond_gates(self) -> str | None:
        """The reason why no gate was measured for such a request, or None."""
        if self.heads is not None or self.coefficients is not None:
            return "heads are given in the request"
        if isinstance(self.strength, tuple):
            return "strength is a schedule"
        return None if self.positions == "all" else "not all positions are steered"

    def method_with(self, head_set: HeadSet) -> Method:
        """Return the method that scales the heads of a set: the one asked for, else the set's."""
        asked = self.method or head_set.method
        assert scales_heads(asked), "contrasts use no head set"
        return asked


# An answer has every field, so clients made from the schema need not ask whether it is there.
COMPLETE = ConfigDict(json_schema_serialization_defaults_required=True)


@dataclass(frozen=True, kw_only=True)
class GateReport:
    """The decision of a gate, and the number behind it.

    Args:
        steers: Whether the request is steered.
        signal: The name of the number that decided: `memory`, `steered` or `copied`.
        value: The number, a probability.
        threshold: The least number at which a request is steered.
    """

    __pydantic_config__: ClassVar[ConfigDict] = COMPLETE

    steers: bool
    signal: Signal
    value: float
    threshold: float


@dataclass(frozen=True, kw_only=True)
class TokenChance:
    """The likeliest next token of a run.

    Args:
        id: The token.
        text: Its text when it stands alone.
        probability: Its probability.
    """

    __pydantic_config__: ClassVar[ConfigDict] = COMPLETE

    id: int
    text: str
    probability: float


@dataclass(frozen=True, kw_only=True)
class EffectReport:
    """The effect of steering, and of the context, on the first new token.

    Args:
        unsteered: The likeliest token without steering.
        steered: The likeliest token of the request itself.
        divergence: KL(unsteered || steered), in nats, at least: over the twenty likeliest tokens
            without steering, and all others as one.
        without_context: The likeliest token without steering and without the context; None where
            that is not given apart.
        context_divergence: KL(unsteered || without the context), likewise: what the context
            changes in the unsteered model.
    """

    __pydantic_config__: ClassVar[ConfigDict] = COMPLETE

    unsteered: TokenChance
    steered: TokenChance
    divergence: float
    without_context: TokenChance | None = None
    context_divergence: float | None = None


@dataclass(frozen=True, kw_only=True)
class SteeringReport:
    """The steering that was applied to a request; part of every answer.

    Args:
        applied: Whether the request was steered at all.
        target: The target that it was steered toward; None where coefficients were given alone.
        head_set: The name of the head set; for heads in the request, `inline:` and their hash.
        beta_plus: The scale of the + heads before the strength; the smallest and the largest where
            each head has its own.
        beta_minus: The same of the - heads.
        strength: The factor of all betas, or the schedule of it, or the weight of a contrast.
        method: `juice`, `june`, or a contrast.
        n_heads: The number of heads that were steered.
        positions: The positions that are steered: `all`, `question`, `last`, `generated`, or the
            first so many generated ones.
        gate: The decision of the gate; None without one.
        exact: Whether steering is exact; false where the model's activations are quantised.
        effect: What it changed at the first new token, where the request asks for that.
        warnings: The circumstances that may weaken the steering, or why it changed nothing.
    """

    __pydantic_config__: ClassVar[ConfigDict] = COMPLETE

    applied: bool
    target: SteerTarget | None
    head_set: str | None = None
    beta_plus: Spread = 0.0
    beta_minus: Spread = 0.0
    strength: float | tuple[float, ...] = 0.0
    method: SteerMethod = "juice"
    n_heads: int = 0
    positions: Positions = "all"
    gate: GateReport | None = None
    exact: bool = True
    effect: EffectReport | None = None
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self)


@dataclass(frozen=True, eq=False, kw_only=True)
class Steering:
    """The steering of a request's rows, resolved against a head set.

    `coefficients` holds float32 [n_heads] by layer, only for layers where one is not zero. They are
    added at the positions `[first_position, last_position)`, counted in tokens from the prompt's
    first; None: to the end. They are multiplied by a factor of the `schedule`: its first at the
    prompt, the others at each generated token in turn, the last of all at those that follow;
    without any it is 1.
    """

    coefficients: Mapping[int, torch.Tensor]
    report: SteeringReport
    first_position: int = 0
    last_position: int | None = None
    schedule: tuple[float, ...] = ()

    def factors(self, positions: torch.Tensor, n_prompt: int) -> torch.Tensor:
        """Return the factor of the coefficients at each position, int64 [pos], as float32 [pos].

        It is 0 where nothing is added; `n_prompt` is the number of the prompt's tokens.
        """
        steered = positions >= self.first_position
        if self.last_position is not None:
            steered &= positions < self.last_position
        if not self.schedule:
            return steered.float()
        factors = torch.tensor(self.schedule, device=positions.device)
        return steered * factors[(positions - n_prompt + 1).clamp(0, len(self.schedule) - 1)]

    @property
    def is_constant(self) -> bool:
        """Whether the factor is 1 everywhere."""
        return not (self.first_position or self.last_position is not None or self.schedule)

    @property
    def window(self) -> range:
        """The layers with a companion; empty where none is needed.

        Below the lowest steered layer the clean and the steered row are the same; above the highest
        nothing reads the companion. With one steered layer the clean z is the steered row's own,
        and the single run (JuNe) never reads a clean row.
        """
        if self.report.method != "juice" or len(self.coefficients) < 2:
            return range(0)
        return range(min(self.coefficients), max(self.coefficients) + 1)

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The steered heads, as (layer, head)."""
        return [
            (layer, head)
            for layer, by_head in sorted(self.coefficients.items())
            for head in torch.nonzero(by_head).flatten().tolist()
        ]

    def placed(self, n_prompt: int, question_at: int = 0) -> Steering:
        """Return the same at the positions of its report, in a prompt of so many tokens.

        `question_at` is the first token after the context.
        """
        positions, last = self.report.positions, None
        if isinstance(positions, FirstGenerated):
            first, last = n_prompt, n_prompt + positions.first_n_generated
        else:
            firsts = {"all": 0, "question": question_at, "last": n_prompt - 1}
            first = firsts.get(positions, n_prompt)
        return replace(self, first_position=first, last_position=last)

    def warning_of(self, circumstance: str) -> Steering:
        """Return the same whose report warns of one more circumstance."""
        warnings = (*self.report.warnings, circumstance)
        return replace(self, report=replace(self.report, warnings=warnings))

    def without(self, layer: int, head: int) -> Steering:
        """Return the same without one head."""
        by_head = self.coefficients[layer].clone()
        by_head[head] = 0.0
        changed = sorted({**self.coefficients, layer: by_head}.items())
        kept = {at: values for at, values in changed if values.any()}
        report = replace(self.report, applied=bool(kept), n_heads=max(0, self.report.n_heads - 1))
        return replace(self, coefficients=kept, report=report)

    def turned_off(self, gate: GateReport) -> Steering:
        """Return the steering that does nothing, because a gate decided so."""
        report = replace(self.report, applied=False, n_heads=0, gate=gate)
        return Steering(coefficients={}, report=report)


def unsteered(steer: Steer | None = None, *, exact: bool = True) -> Steering:
    """Return the steering that does nothing."""
    target, method = (steer.target, steer.method) if steer else ("none", None)
    report = SteeringReport(applied=False, target=target, method=method or "juice", exact=exact)
    return Steering(coefficients={}, report=report)


def resolve(
    steer: Steer,
    head_set: HeadSet | None,
    *,
    model_id: str = "the model",
    heads_per_layer: Sequence[int] = (),
    chat_template_sha256: str | None = None,
    exact: bool = True,
) -> Steering:
    """Turn what a request asks for into coefficients, at all positions until it is `placed`.

    Args:
        steer: The steering that the request asks for.
        head_set: The head set to use; None for `none` and contrasts, which use none, and for heads
            in the request.
        model_id: The model's id, for errors.
        heads_per_layer: The number of its heads in each layer; for heads in the request.
        chat_template_sha256: The hash of the chat template of the prompt; None for a plain prompt.
        exact: Whether the model is steered exactly; goes into the report.

    Raises:
        RequestError: Neither request nor set has the betas, the set is for another target, or the
            model lacks a head.
    """
    if steer.target == "none":
        return unsteered(steer, exact=exact)
    if steer.method is not None and not scales_heads(steer.method):
        assert not isinstance(steer.strength, tuple), "a contrast has one weight"
        report = SteeringReport(
            applied=steer.strength > 0,
            target=steer.target,
            strength=steer.strength,
            method=steer.method,
            exact=exact,
        )
        return Steering(coefficients={}, report=report)
    schedule = steer.strength if isinstance(steer.strength, tuple) else ()
    strength = (1.0 if any(schedule) else 0.0) if schedule else steer.strength
    assert not isinstance(strength, tuple)
    if (inline := steer.inline) is not None:
        try:
            check_within(inline.heads.all, heads_per_layer, model_id)
        except ValueError as error:
            param = "heads" if steer.coefficients is None else "coefficients"
            raise RequestError(str(error), param=f"steer.{param}") from error
        name, method, betas = inline.name, steer.method or "juice", inline.betas
        coefficients = inline.coefficients(betas, strength, max(heads_per_layer))
        warning = None
    else:
        assert head_set is not None, "a method that scales heads has a head set"
        if head_set.target != steer.target:
            raise RequestError(
                f"head set {head_set.name!r} steers toward {head_set.target}; the request asks for "
                f"{steer.target}: name a set of that target",
                param="steer.head_set",
            )
        name, method = head_set.name, steer.method_with(head_set)
        betas = head_set.applied_betas(
            method, beta_plus=steer.beta_plus, beta_minus=steer.beta_minus
        )
        coefficients = head_set.coefficients(method, betas, strength)
        warning = head_set.form_warning(chat_template_sha256) if coefficients else None
    report = SteeringReport(
        applied=bool(coefficients),
        target=steer.target,
        head_set=name,
        beta_plus=betas.spread("plus"),
        beta_minus=betas.spread("minus"),
        strength=steer.strength,
        method=method,
        n_heads=sum(int(values.count_nonzero()) for values in coefficients.values()),
        positions=steer.positions,
        exact=exact,
        warnings=() if warning is None else (warning,),
    )
    return Steering(coefficients=coefficients, report=report, schedule=schedule)
