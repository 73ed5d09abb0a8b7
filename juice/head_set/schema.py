"""The content of a head set: heads, betas and gates by method, model, origin, effect, scores.

All parts are immutable, finite and without unknown fields. A **method** scales its heads: `juice`
in two runs, `june` in one. Its **betas** scale the recorded z, one for all heads of a sign or one
for each head. Its **gate** tells, by a number at a prompt's end, whether a request is steered:

    memory   the largest probability of the next token without the context and without steering
    steered  the same of the steered run
    copied   the same of the steered run if the token occurs in the prompt, else 0

Where the number reaches the threshold, the request is steered. Betas and a request's strength
become the coefficients of z:

    coefficient[layer][head] = strength * (beta_plus if head in plus)
                             + strength * (beta_minus if head in minus)

Content of the older formats is turned into that of this one here.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, get_args

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from juice.errors import HeadSetError, RequestError
from juice.files import sha256_of
from juice.formula import METHODS, Method, Target
from juice.head_set.scores import HeadScores, ScoreKind

FORMAT: Final = "juice.head_set/3"
# Without methods: one list of heads for both. The first had no seal, and one beta a sign.
SECOND_FORMAT, FIRST_FORMAT = "juice.head_set/2", "juice.head_set/1"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
SHA256_PATTERN = r"^sha256:[0-9a-f]{64}$"
FACT_PATTERN = r"^[0-9a-f]{12}$"
MAX_BETA = 100.0
RANGES = {"strength": (0.0, MAX_BETA), "beta_plus": (0.0, MAX_BETA), "beta_minus": (-MAX_BETA, 0.0)}


def check_scale(name: str, value: float | None) -> None:
    """Raise RequestError for a strength or beta out of its range; None is in range."""
    low, high = RANGES[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and math.isfinite(value) and low <= value <= high):
        raise RequestError(
            f"{name} is {value!r}; expected a number from {low:g} to {high:g}",
            param=f"steer.{name}",
        )


def slug(model_id: str) -> str:
    """Return the folder name of a model's head sets: its public id with `/` as `--`."""
    return public_id(model_id).replace("/", "--")


def public_id(model_id: str) -> str:
    """Return a model's id as others know it: for a path, its last part."""
    is_path = model_id.startswith((".", "/", "~")) or Path(model_id).is_dir()
    return Path(model_id).resolve().name if is_path else model_id


def short(sha256: str | None) -> str:
    """Return the beginning of a hash, enough to tell two apart, or `none`."""
    if sha256 is None:
        return "none"
    kind, colon, digits = sha256.rpartition(":")
    return f"{kind}{colon}{digits[:12]}…"


class Part(BaseModel):
    """A part of a head set."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


class Head(NamedTuple):
    """A query head: layer and index, both counted from 0. Orders by layer, then index."""

    layer: int
    index: int  # type: ignore[assignment]  # a head has an index; nobody searches in one

    def __str__(self) -> str:
        return f"L{self.layer}H{self.index}"


def check_within(heads: Iterable[Head], heads_per_layer: Sequence[int], model_id: str) -> None:
    """Raise ValueError for a head that a model does not have."""
    n_layers = len(heads_per_layer)
    for head in heads:
        if not 0 <= head.layer < n_layers:
            raise ValueError(
                f"head {head} is out of range: {model_id} has {n_layers} layers (0-{n_layers - 1})"
            )
        n_heads = heads_per_layer[head.layer]
        if not 0 <= head.index < n_heads:
            raise ValueError(
                f"head {head} is out of range: layer {head.layer} of {model_id} has {n_heads}"
                f" heads (0-{n_heads - 1})"
            )


class HeadLists(Part):
    """The heads of each sign.

    Args:
        plus: The + heads, best first, each its layer and its number there.
        minus: The - heads, likewise.
    """

    plus: tuple[Head, ...] = ()
    minus: tuple[Head, ...] = ()

    @model_validator(mode="after")
    def _unique(self) -> Self:
        for sign, heads in self:
            if len(set(heads)) < len(heads):
                raise ValueError(f"the {sign} heads list a head twice")
        if not self.plus and not self.minus:
            raise ValueError("no heads of either sign")
        return self

    @property
    def all(self) -> tuple[Head, ...]:
        """The heads of both signs, each once, in order."""
        return tuple(sorted({*self.plus, *self.minus}))


Sign = Literal["plus", "minus"]
Plus = Annotated[float, Field(ge=0, le=MAX_BETA)]
Minus = Annotated[float, Field(le=0, ge=-MAX_BETA)]
# A beta, or the smallest and the largest of several.
Spread = float | tuple[float, float]


class Betas(Part):
    """Scales of the recorded z; a list has one for each head, in the order of the method's heads.

    Args:
        plus: The scales of the + heads, 0 or more.
        minus: The scales of the - heads, 0 or less.
    """

    plus: Plus | tuple[Plus, ...]
    minus: Minus | tuple[Minus, ...]

    @model_validator(mode="after")
    def _alike(self) -> Self:
        if isinstance(self.plus, tuple) != isinstance(self.minus, tuple):
            raise ValueError("one of plus and minus lists a beta for each head, the other does not")
        return self

    @property
    def is_per_head(self) -> bool:
        """Whether each head has a beta of its own."""
        return isinstance(self.plus, tuple)

    def spread(self, sign: Sign) -> Spread:
        """Return the beta of a sign, or the smallest and largest of its heads; 0 without heads."""
        given: float | tuple[float, ...] = getattr(self, sign)
        if isinstance(given, tuple):
            return (min(given), max(given)) if given else 0.0
        return given

    def __str__(self) -> str:
        return f"{spelled(self.spread('plus'))} {spelled(self.spread('minus'))}"


def spelled(spread: Spread) -> str:
    """Return a beta, or the range of several, as text."""
    if isinstance(spread, tuple):
        return f"{spread[0]:+.3g}..{spread[1]:+.3g}"
    return f"{spread:+g}"


Signal = Literal["memory", "steered", "copied"]


class GateRule(Part):
    """A signal and its threshold, with what they did on validation examples.

    Args:
        signal: The number that decides; `memory` needs the context apart from the prompt.
        threshold: The least number at which a request is steered.
        n_prompts: The number of prompts with a conflict that were measured.
        kept: The share of these that stay steered.
        side_effects: The shares of right answers to prompts that steering should leave alone,
            without steering and with the gate.
    """

    signal: Signal
    threshold: float
    n_prompts: int = Field(ge=1)
    kept: float = Field(ge=0, le=1)
    side_effects: dict[str, tuple[float, float]]

    def __str__(self) -> str:
        others = "".join(
            f", {kind} {without:.2f} -> {gated:.2f}"
            for kind, (without, gated) in self.side_effects.items()
        )
        return (
            f"{self.signal} >= {self.threshold:.3g} steers {self.kept:.2f} of {self.n_prompts}"
            f" conflicts{others}"
        )


class Gate(Part):
    """The rules for the betas of one method at strength 1; the first one that can be used decides.

    They hold for prompts in one form.

    Args:
        chat_template_sha256: The hash of the chat template of the prompts; None: plain ones.
        rules: The rules, in the order in which they are tried.
    """

    chat_template_sha256: str | None
    rules: tuple[GateRule, ...] = Field(min_length=1)


class Intervention(Part):
    """The heads that one method scales, by which betas, and when.

    Args:
        heads: The heads of each sign.
        betas: The best betas; None where untuned.
        gate: When to steer with these betas; None where none was measured, or was good enough.
    """

    heads: HeadLists
    betas: Betas | None = None
    gate: Gate | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for sign in get_args(Sign):
            n_heads, betas = len(getattr(self.heads, sign)), getattr(self.betas, sign, None)
            if isinstance(betas, tuple) and len(betas) != n_heads:
                raise ValueError(f"betas.{sign} lists {len(betas)} betas for {n_heads} heads")
        if self.gate is not None and self.betas is None:
            raise ValueError("a gate is given, but the betas that it is for are not")
        return self

    def coefficients(self, betas: Betas, strength: float, n_heads: int) -> dict[int, torch.Tensor]:
        """Return the coefficients of each layer where one is not zero, float32 [n_heads].

        A head in both lists gets the sum.
        """
        coefficients: dict[int, torch.Tensor] = {}
        for heads, beta in ((self.heads.plus, betas.plus), (self.heads.minus, betas.minus)):
            scales = beta if isinstance(beta, tuple) else (beta,) * len(heads)
            for head, scale in zip(heads, scales, strict=True):
                layer = coefficients.setdefault(head.layer, torch.zeros(n_heads))
                layer[head.index] += strength * scale
        return {layer: values for layer, values in coefficients.items() if values.any()}


class Methods(Part):
    """The intervention of each method; None for a method that the head set does not have."""

    juice: Intervention | None = None
    june: Intervention | None = None

    @classmethod
    def sharing(cls, heads: HeadLists, **betas: Betas) -> Self:
        """Return the same heads for both methods, with the betas given by method."""
        return cls(**{m: Intervention(heads=heads, betas=betas.get(m)) for m in METHODS})

    @property
    def given(self) -> dict[Method, Intervention]:
        """The interventions that there are, by method."""
        return {m: given for m in METHODS if (given := getattr(self, m)) is not None}


class Weights(Part):
    """The file that a model's weights came from.

    Args:
        sha256: The hash of the file.
        quantisation: How it stores them, in its own words, such as `Q4_K_M`; None: unquantised.
        fingerprint: The fingerprint of the dequantised weights.
    """

    sha256: str = Field(pattern=SHA256_PATTERN)
    quantisation: str | None = None
    fingerprint: str


SHAPE_FIELDS = ("architecture", "n_layers", "n_heads")


class ModelIdentity(Part):
    """The model that a head set is for.

    Id, revision and weights are for people; the fingerprint, or architecture and shape, decides.
    """

    id: str = Field(pattern=r"^[^\x00-\x1f\x7f]+$")
    revision: str | None = None
    architecture: str
    n_layers: int = Field(ge=1)
    n_heads: int = Field(ge=1)
    fingerprint: str | None = None
    weights: Weights | None = None

    def difference(self, other: ModelIdentity) -> str | None:
        """Return the difference of another model from this one, or None if there is none.

        Compares the fingerprints, where both have one, then architecture and shape.
        """
        if self.fingerprint and other.fingerprint and self.fingerprint != other.fingerprint:
            return (
                f"its fingerprint is {short(self.fingerprint)}, "
                f"the loaded model's is {short(other.fingerprint)}"
            )
        for field in SHAPE_FIELDS:
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return f"its {field} is {mine}, the loaded model's is {theirs}"
        return None

    def is_certain(self, other: ModelIdentity) -> bool:
        """Return whether both models have a fingerprint, so that `difference` is not a guess."""
        return bool(self.fingerprint and other.fingerprint)

    def requantised(self, other: ModelIdentity) -> str | None:
        """Return how another file stores the same model otherwise, or None if it does not."""
        mine, theirs = self.weights, other.weights
        if mine is None or theirs is None or mine.quantisation == theirs.quantisation:
            return None
        if any(getattr(self, n) != getattr(other, n) for n in ("id", *SHAPE_FIELDS)):
            return None
        return f"as {mine.quantisation}, and the loaded file stores it as {theirs.quantisation}"

    def check_holds(self, heads: HeadLists) -> None:
        """Raise ValueError for a head that the model does not have."""
        for head in heads.all:
            if not (0 <= head.layer < self.n_layers and 0 <= head.index < self.n_heads):
                raise ValueError(
                    f"head {head} is out of range: {self.id} has {self.n_layers} layers "
                    f"(0-{self.n_layers - 1}) of {self.n_heads} heads (0-{self.n_heads - 1}); "
                    "identify heads on this model first"
                )


class Identification(Part):
    """The way in which heads were found, in enough detail to find them again.

    The alphas are the probes' scales; other methods have none. Without a `top_k`, the heads are all
    that the method kept. `facts` are the keys (`juice.data.example.fact_keys`) of the
    examples that were given to find and to tune them, sorted; older sets have none.
    """

    method: ScoreKind
    alphas_plus: tuple[Annotated[float, Field(gt=0)], ...] = ()
    alphas_minus: tuple[Annotated[float, Field(lt=0)], ...] = ()
    n_examples: int = Field(ge=1)
    seed: int
    examples_sha256: str
    # Left out where there are none, so that older sets keep their hash.
    facts: tuple[Annotated[str, Field(pattern=FACT_PATTERN)], ...] = Field(
        default=(), exclude_if=operator.not_
    )
    conflict_types: tuple[str, ...]
    top_k: int | None = Field(default=None, ge=1)
    chat_template_sha256: str | None = None
    versions: dict[str, str]


class Harm(Part):
    """The harm of steering to ordinary text, at all positions and without a gate.

    Args:
        divergence: KL(unsteered || steered) of the next token, nats a token.
        perplexity: The steered perplexity, divided by the unsteered.
    """

    divergence: float = Field(ge=0, allow_inf_nan=False)
    perplexity: float = Field(ge=0, allow_inf_nan=False)

    def __str__(self) -> str:
        return f"{self.divergence:.3f} nats a token, perplexity x {self.perplexity:.2f}"


class Point(Part):
    """A point on the line of accuracy against divergence that learning found.

    Args:
        weight: The weight of divergence in what was minimised.
        scale: What multiplies the coefficients that were learned with it.
        won: The share of conflicts whose answer begins right, on validation examples.
        divergence: Nats a token of ordinary text, or of what is left open where that is more.
    """

    weight: float
    scale: float
    won: float
    divergence: float


HARM_STRENGTHS = (0.5, 1.0, 2.0)
CLEARLY_MORE = 0.05  # of the conflicts
NEED_NO_STEERING = ("clean", "true")  # no context, or one that says what the model remembers


class Validation(Part):
    """The effect of betas on the examples that tuned them: shares of target answers by type.

    `gain` is the mean change over the conflicts, with its 95 % interval, and `by_relation` that of
    each relation with its number of examples. `side_effects` are the shares of right answers to
    prompts that steering should leave alone, without and with it; `open` ones, which leave open
    what is said, are right where their likeliest token stays, and `ends` are the replies that end
    where they do without it. `harm` is what strengths do to
    ordinary text, `allowed` the divergence that was, in nats a token, and `line` the choice that a
    learned set was taken from. Older sets have less of these.
    """

    n_examples: int = Field(ge=1)
    accuracy: dict[str, float]
    accuracy_unsteered: dict[str, float]
    gain: float | None = None
    gain_interval: tuple[float, float] | None = None
    by_relation: dict[str, tuple[float, int]] = Field(default_factory=dict)
    side_effects: dict[str, tuple[float, float]] = Field(default_factory=dict)
    harm: dict[str, Harm] = Field(default_factory=dict)
    line: tuple[Point, ...] = ()
    allowed: float | None = None

    @model_validator(mode="after")
    def _same_types(self) -> Self:
        if self.accuracy.keys() != self.accuracy_unsteered.keys():
            raise ValueError("accuracy and accuracy_unsteered have different conflict types")
        return self

    @property
    def is_weak(self) -> bool:
        """Whether the gain is not certainly above zero."""
        return self.gain_interval is not None and self.gain_interval[0] <= 0

    @property
    def beyond(self) -> Point | None:
        """The point that wins most, where that is clearly more than what is allowed wins."""
        allowed = [point.won for point in self.line if point.divergence <= (self.allowed or 0)]
        most = max(self.line, key=lambda point: point.won, default=None)
        is_more = most is not None and most.won > max(allowed, default=0) + CLEARLY_MORE
        return most if is_more else None

    @property
    def coverage(self) -> str:
        """How many of the examples' relations gain, and which do not; empty where unknown."""
        if not self.by_relation:
            return ""
        if len(self.by_relation) == 1:
            (only,) = self.by_relation
            return f"only the relation {only}: on others expect less"
        lost = {name: gain for name, (gain, _) in self.by_relation.items() if gain <= 0}
        n_gained = len(self.by_relation) - len(lost)
        which = ", ".join(f"{name} {gain:+.2f}" for name, gain in sorted(lost.items()))
        of = f"{n_gained} of {len(self.by_relation)} relations"
        return f"{of}; no gain: {which}" if lost else of

    def broken(self, accepted_loss: float) -> dict[str, tuple[float, float]]:
        """Return the shares of prompts that need no steering, by kind, where more break than may.

        Others are endangered by what steering is for, and only reported.
        """
        found = ((kind, self.side_effects.get(kind, (0.0, 0.0))) for kind in NEED_NO_STEERING)
        return {kind: (a, b) for kind, (a, b) in found if round(a - b, 9) > accepted_loss}

    @property
    def left_alone(self) -> str:
        """What became of prompts that steering should leave alone; empty where unknown."""
        found = (f"{k} {was:.2f} -> {now:.2f}" for k, (was, now) in self.side_effects.items())
        return ", ".join(found)

    @property
    def harm_lines(self) -> list[str]:
        """What each strength does to ordinary text, and where that is more than is allowed."""
        lines = []
        for strength, harm in self.harm.items():
            is_beyond = strength == "1" and harm.divergence > (self.allowed or math.inf)
            more = f" (beyond the {self.allowed:g} allowed)" if is_beyond else ""
            lines.append(f"strength {strength}: ordinary text diverges by {harm}{more}")
        return lines


def checked_metrics(value: dict[str, Any]) -> dict[str, Any]:
    """Return a set's metrics; raises ValueError for a wrong validation, or infinite numbers."""
    for method in METHODS:
        if f"validation_{method}" in value:
            Validation.model_validate(value[f"validation_{method}"])
    _check_finite(value)
    return value


def _check_finite(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"holds {value}; expected finite numbers")
    if isinstance(value, Mapping):
        for item in value.values():
            _check_finite(item)


class Content(Part):
    """What `head_set.json` holds, in its order, and the scores beside it; see `HeadSet`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    format: Literal["juice.head_set/3"] = FORMAT
    name: str = Field(pattern=NAME_PATTERN)
    target: Target
    source: str | None = None
    model: ModelIdentity
    method: Method = "juice"
    methods: Methods
    identification: Identification | None = None
    metrics: Annotated[dict[str, Any], AfterValidator(checked_metrics)] = Field(
        default_factory=dict
    )
    scores_sha256: str | None = Field(default=None, pattern=SHA256_PATTERN)
    scores: HeadScores | None = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.method not in self.methods.given:
            raise ValueError(f"method is {self.method}, but methods.{self.method} is not given")
        for intervention in self.methods.given.values():
            self.model.check_holds(intervention.heads)
        return self

    @property
    def facts(self) -> tuple[str, ...]:
        """The keys of the facts that found and tuned the set; none where it does not say."""
        return () if self.identification is None else self.identification.facts

    def validation(self, method: Method | None = None) -> Validation | None:
        """Return the effect of a method's tuned betas on their validation examples, or None."""
        measured = self.metrics.get(f"validation_{method or self.method}")
        return Validation.model_validate(measured) if measured else None


def sealed(content: Mapping[str, Any]) -> str:
    """Return the hash of a head set's JSON content, whatever its order and white space."""
    return sha256_of(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def upgraded(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a head set's JSON content in the current format.

    Sets of older formats have one list of heads, which both methods share; those of the first
    format were all found by probes. Raises HeadSetError, which names `where`, for another format.
    """
    given, rest = content.get("format"), dict(content)
    if given == FORMAT:
        return rest
    if given not in (SECOND_FORMAT, FIRST_FORMAT):
        raise HeadSetError(
            f"{where}: format is {given!r}, expected {FORMAT!r}, {SECOND_FORMAT!r} or "
            f"{FIRST_FORMAT!r}; this version of JuICE reads no other"
        )
    if newer := sorted({"method", "methods"} & rest.keys()):
        raise HeadSetError(f"{where}: {newer[0]} is given, but the format is {given!r}")
    heads = rest.pop("heads", None)
    betas, gates = (_by_method(rest.pop(field, None), field, where) for field in ("beta", "gates"))
    rest["methods"] = {
        m: {"heads": heads, "betas": betas.get(m), "gate": gates.get(m)} for m in METHODS
    }
    identification = rest.get("identification")
    if given == FIRST_FORMAT and isinstance(identification, Mapping):
        rest["identification"] = {"method": "probe", **identification}
    return {**rest, "format": FORMAT}


def _by_method(table: Any, field: str, where: str) -> Mapping[str, Any]:
    if table is None:
        return {}
    if not isinstance(table, Mapping) or not table.keys() <= {*METHODS}:
        raise HeadSetError(f"{where}: {field} is {table!r}; expected an object with juice and june")
    return table
