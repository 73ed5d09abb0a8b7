"""The content of a head set: the heads of each sign, their betas, their model and their origin.

A head set is immutable and valid once it exists: its heads are within the model it names, each sign
lists a head once, betas are finite and of the right sign. `HeadSet.parse` raises HeadSetError for
anything else.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from juice.errors import HeadSetError, HeadSetMismatchError
from juice.head_set.betas import Betas, BetaTable
from juice.head_set.gates import Gate, GateTable
from juice.head_set.parts import Part
from juice.head_set.scores import HeadScores, ScoreKind
from juice.head_set.validation import Validation, checked_metrics
from juice.methods import METHODS, Method, Target
from juice.options import first_problem

FORMAT: Final = "juice.head_set/2"
FIRST_FORMAT: Final = "juice.head_set/1"
# The seals of the sets that come with JuICE for weights that nobody recorded.
PUBLISHED = frozenset({"sha256:b7ba66f17752d764479d1fd0883196050d662ce42a410b67573bbc783d9513c4"})
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Head(NamedTuple):
    """A query head: layer and index, both counted from 0. Orders by layer, then index."""

    layer: int
    index: int  # type: ignore[assignment]  # a head has an index; nobody searches in one

    def __str__(self) -> str:
        return f"L{self.layer}H{self.index}"


class ModelIdentity(Part):
    """Which model a head set is for.

    Id and revision are for people; the fingerprint, or architecture and shape, decides.
    """

    id: str = Field(pattern=r"^[^\x00-\x1f\x7f]+$")
    revision: str | None = None
    architecture: str
    n_layers: int = Field(ge=1)
    n_heads: int = Field(ge=1)
    fingerprint: str | None = None

    def difference(self, other: ModelIdentity) -> str | None:
        """Return how another model differs from this one, or None if it does not.

        Compares the fingerprints, where both have one, then architecture and shape.
        """
        if self.fingerprint and other.fingerprint and self.fingerprint != other.fingerprint:
            return (
                f"its fingerprint is {short(self.fingerprint)}, "
                f"the loaded model's is {short(other.fingerprint)}"
            )
        for field in ("architecture", "n_layers", "n_heads"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return f"its {field} is {mine}, the loaded model's is {theirs}"
        return None

    def is_certain(self, other: ModelIdentity) -> bool:
        """Return whether both models have a fingerprint, so that `difference` is not a guess."""
        return bool(self.fingerprint and other.fingerprint)


class HeadLists(Part):
    """The heads of each sign, best first."""

    plus: tuple[Head, ...] = ()
    minus: tuple[Head, ...] = ()

    @model_validator(mode="after")
    def _unique(self) -> Self:
        for sign, heads in (("plus", self.plus), ("minus", self.minus)):
            if len(set(heads)) < len(heads):
                raise ValueError(f"the {sign} heads list a head twice")
        if not self.plus and not self.minus:
            raise ValueError("no heads of either sign")
        return self


class Identification(Part):
    """How the heads were found, in enough detail to find them again.

    The alphas are the probes' scales; other methods have none. Without a `top_k`, the heads are all
    that the method kept.
    """

    method: ScoreKind
    alphas_plus: tuple[Annotated[float, Field(gt=0)], ...] = ()
    alphas_minus: tuple[Annotated[float, Field(lt=0)], ...] = ()
    n_examples: int = Field(ge=1)
    seed: int
    examples_sha256: str
    conflict_types: tuple[str, ...]
    top_k: int | None = Field(default=None, ge=1)
    chat_template_sha256: str | None = None
    versions: dict[str, str]


class HeadSetContent(Part):
    """The content of a head set; its heads were chosen from `scores`.

    `HeadSet` adds how to load, save and share it.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    format: Literal["juice.head_set/2"] = FORMAT
    name: str = Field(pattern=NAME_PATTERN)
    target: Target
    source: str | None = None
    model: ModelIdentity
    heads: HeadLists
    beta: BetaTable | None = None
    gates: GateTable | None = None
    identification: Identification | None = None
    metrics: Annotated[dict[str, Any], AfterValidator(checked_metrics)] = Field(
        default_factory=dict
    )
    scores_sha256: str | None = None
    scores: HeadScores | None = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _heads_in_range(self) -> Self:
        for head in (*self.heads.plus, *self.heads.minus):
            if not (0 <= head.layer < self.model.n_layers and 0 <= head.index < self.model.n_heads):
                raise ValueError(
                    f"head {head} is out of range: {self.model.id} has {self.model.n_layers} "
                    f"layers (0-{self.model.n_layers - 1}) of {self.model.n_heads} heads "
                    f"(0-{self.model.n_heads - 1}); identify heads on this model first"
                )
        return self

    @model_validator(mode="after")
    def _a_beta_for_each_head(self) -> Self:
        for method in METHODS:
            betas = self.betas(method)
            for sign, heads in (("plus", self.heads.plus), ("minus", self.heads.minus)):
                own = getattr(betas, sign, None)
                if isinstance(own, tuple) and len(own) != len(heads):
                    raise ValueError(
                        f"beta.{method}.{sign} lists {len(own)} betas for {len(heads)} heads"
                    )
        return self

    @model_validator(mode="after")
    def _a_gate_for_betas(self) -> Self:
        for method in METHODS:
            if self.gate(method) is not None and self.betas(method) is None:
                raise ValueError(f"gates.{method} is given, but beta.{method} is not")
        return self

    @classmethod
    def parse(cls, content: Mapping[str, Any], where: str) -> Self:
        """Validate a head set's JSON content, of this format or the first.

        Raises HeadSetError, which names `where` and the field.
        """
        given = content.get("format")
        if given not in (FORMAT, FIRST_FORMAT):
            raise HeadSetError(
                f"{where}: format is {given!r}, expected {FORMAT!r} or {FIRST_FORMAT!r}; "
                "this version of JuICE reads no other"
            )
        own = _upgraded(content) if given == FIRST_FORMAT else content
        try:
            return cls.model_validate_json(json.dumps(own, default=_plain), strict=True)
        except TypeError as error:
            raise HeadSetError(f"{where}: {error}") from error
        except ValidationError as error:
            field, problem = first_problem(error)
            raise HeadSetError(f"{where}: {field + ': ' if field else ''}{problem}") from error

    @property
    def chat_template_sha256(self) -> str | None:
        """The hash of the chat template through which the heads were found.

        None for plain prompts, and where it is not known.
        """
        return self.identification.chat_template_sha256 if self.identification else None

    @property
    def seal(self) -> str:
        """The hash of the whole set, that of its scores included."""
        return sealed(self.model_dump(mode="json"))

    def form_warning(self, used_sha256: str | None) -> str | None:
        """Return a warning if a prompt's form is not the one the heads were found in, else None.

        The form is the hash of the chat template that a prompt went through, None for a plain one.
        A set without an identification (made by hand) gives no warning.
        """
        found_sha256 = self.chat_template_sha256
        if self.identification is None or found_sha256 == used_sha256:
            return None
        if found_sha256 is None:
            found, used = "on plain prompts", "went through a chat template"
        else:
            found = f"through the chat template {short(found_sha256)}"
            used = f"went through {short(used_sha256)}" if used_sha256 else "did not go through one"
        return (
            f"head set {self.name!r} was found {found}, but this prompt {used}: "
            "it may steer less well"
        )

    def betas(self, method: Method = "juice") -> Betas | None:
        """Return the tuned betas of a method, or None."""
        return getattr(self.beta, method) if self.beta else None

    def gate(self, method: Method = "juice") -> Gate | None:
        """Return what tells when the tuned betas of a method should steer, or None."""
        return getattr(self.gates, method) if self.gates else None

    def validation(self, method: Method = "juice") -> Validation | None:
        """Return what the tuned betas of a method did on their validation examples, or None."""
        measured = self.metrics.get(f"validation_{method}")
        return Validation.model_validate(measured) if measured else None

    def with_betas(self, method: Method, betas: Betas) -> Self:
        """Return this set with the betas of one method, and without what others of it did."""
        table = (self.beta or BetaTable()).model_copy(update={method: betas})
        kept = {k: v for k, v in self.metrics.items() if k != f"validation_{method}"}
        return self.model_copy(update={"beta": table, "metrics": kept}).with_gate(method, None)

    def with_gate(self, method: Method, gate: Gate | None) -> Self:
        """Return this set with another gate for the betas of a method, or without one."""
        table = (self.gates or GateTable()).model_copy(update={method: gate})
        return self.model_copy(update={"gates": None if table == GateTable() else table})

    def with_metrics(self, metrics: Mapping[str, Any]) -> Self:
        """Return this set with metrics added."""
        return self.model_copy(update={"metrics": {**self.metrics, **metrics}})

    def check_fits(self, model: ModelIdentity, *, allow_unverified: bool = False) -> None:
        """Raise HeadSetMismatchError unless this set was made for the given model.

        Where one of them has no fingerprint, only architecture and shape can be compared. That is
        enough, with a warning, for a set that comes with JuICE as its authors published it, and
        for any set with `allow_unverified`.
        """
        difference = self.model.difference(model)
        if difference:
            raise HeadSetMismatchError(
                f"head set {self.name!r} was made for {self.model.id} and does not fit the loaded "
                f"{model.id}: {difference}; identify heads on this model (`juice identify`)"
            )
        if self.model.is_certain(model):
            return
        guess = (
            f"head set {self.name!r} fits {model.id} by architecture and shape alone: "
            f"the {'set' if model.fingerprint else 'model'} has no fingerprint to compare"
        )
        if not allow_unverified and self.seal not in PUBLISHED:
            other = "identify heads on this model (`juice identify`), or " * bool(model.fingerprint)
            raise HeadSetMismatchError(
                f"{guess}; {other}take it on trust with --allow-unverified "
                "(allow_unverified=True, JUICE_ALLOW_UNVERIFIED=true)"
            )
        warnings.warn(guess, stacklevel=3)


def sealed(content: Mapping[str, Any]) -> str:
    """Return the hash of a head set's JSON content, whatever its order and white space."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _plain(number: Any) -> Any:
    """Return a number of NumPy or PyTorch as one of Python."""
    if not hasattr(number, "item"):
        raise TypeError(f"{number!r} is a {type(number).__name__}; expected plain data")
    return number.item()


def _upgraded(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return content of the first format, whose heads all came from probes, in this one."""
    found = content.get("identification")
    if isinstance(found, Mapping):
        found = {"method": "probe", **found}
    return {**content, "format": FORMAT, "identification": found}


def short(sha256: str) -> str:
    """Return the beginning of a hash, enough to tell two apart."""
    kind, colon, digits = sha256.rpartition(":")
    return f"{kind}{colon}{digits[:12]}…"
