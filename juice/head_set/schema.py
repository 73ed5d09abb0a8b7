"""What a head set says: the heads of each sign, their betas, the model they belong to and where they come from.

A head set is immutable and valid once it exists: its heads lie within the model it names, each sign lists a head once,
betas are finite and of the right sign. Anything else raises HeadSetError.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from juice.errors import HeadSetError, HeadSetMismatchError
from juice.head_set.scores import HeadScores

if TYPE_CHECKING:
    from juice.head_set.lens import LensHooks

FORMAT: Final = "juice.head_set/1"
MAX_BETA = 100.0
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Target = Literal["context", "parametric"]
TARGETS: tuple[Target, ...] = ("context", "parametric")
Method = Literal["juice", "june"]
METHODS: tuple[Method, ...] = ("juice", "june")


class Head(NamedTuple):
    """A query head: layer and index, both counted from 0. Orders by layer, then index."""

    layer: int
    index: int  # type: ignore[assignment]  # a head has an index; nobody searches in one

    def __str__(self) -> str:
        return f"L{self.layer}H{self.index}"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class ModelIdentity(_Part):
    """Which model: id and revision are for people, the fingerprint (or architecture and shape) decides."""

    id: str = Field(pattern=r"^[^\x00-\x1f\x7f]+$")
    revision: str | None = None
    architecture: str
    n_layers: int = Field(ge=1)
    n_heads: int = Field(ge=1)
    fingerprint: str | None = None

    def difference(self, other: ModelIdentity) -> str | None:
        """Say how another model differs from this one, or None for the same: architecture, shape and, where both have one, fingerprint."""
        if self.fingerprint and other.fingerprint and self.fingerprint != other.fingerprint:
            return f"its fingerprint is {short(self.fingerprint)}, the loaded model's is {short(other.fingerprint)}"
        for field in ("architecture", "n_layers", "n_heads"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return f"its {field} is {mine}, the loaded model's is {theirs}"
        return None

    def is_certain(self, other: ModelIdentity) -> bool:
        """Tell whether both models carry a fingerprint, so that `difference` is more than a guess."""
        return bool(self.fingerprint and other.fingerprint)


class HeadLists(_Part):
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


class Betas(_Part):
    """Scales of the recorded z: `plus >= 0` for the + heads, `minus <= 0` for the - heads."""

    plus: float = Field(ge=0, le=MAX_BETA)
    minus: float = Field(le=0, ge=-MAX_BETA)


class BetaTable(_Part):
    """The best betas of each method; null where untuned."""

    juice: Betas | None = None
    june: Betas | None = None


class Identification(_Part):
    """How the heads were found, enough to find them again."""

    alphas_plus: tuple[Annotated[float, Field(gt=0)], ...]
    alphas_minus: tuple[Annotated[float, Field(lt=0)], ...]
    n_examples: int = Field(ge=1)
    seed: int
    examples_sha256: str
    conflict_types: tuple[str, ...]
    top_k: int = Field(ge=1)
    chat_template_sha256: str | None = None
    versions: dict[str, str]


class Validation(_Part):
    """What betas did on the examples that tuned them: the share of answers that are the target's, by conflict type."""

    n_examples: int = Field(ge=1)
    accuracy: dict[str, float]
    accuracy_unsteered: dict[str, float]

    @model_validator(mode="after")
    def _same_types(self) -> Self:
        if self.accuracy.keys() != self.accuracy_unsteered.keys():
            raise ValueError("accuracy and accuracy_unsteered have different conflict types")
        return self


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"holds {value}; expected finite numbers")
    if isinstance(value, Mapping):
        for item in value.values():
            _finite(item)
    return value


def _metrics(value: dict[str, Any]) -> dict[str, Any]:
    for method in METHODS:
        if f"validation_{method}" in value:
            Validation.model_validate(value[f"validation_{method}"])
    return _finite(value)  # type: ignore[no-any-return]


class HeadSet(_Part):
    """A head set in memory; `load` and `save` are its folder on disk, `scores` what the heads were chosen from."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), arbitrary_types_allowed=True)

    format: Literal["juice.head_set/1"] = FORMAT
    name: str = Field(pattern=NAME_PATTERN)
    target: Target
    source: str | None = None
    model: ModelIdentity
    heads: HeadLists
    beta: BetaTable | None = None
    identification: Identification | None = None
    metrics: Annotated[dict[str, Any], AfterValidator(_metrics)] = Field(default_factory=dict)
    scores_sha256: str | None = None
    scores: HeadScores | None = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _heads_in_range(self) -> Self:
        for head in (*self.heads.plus, *self.heads.minus):
            if not (0 <= head.layer < self.model.n_layers and 0 <= head.index < self.model.n_heads):
                raise ValueError(
                    f"head {head} is out of range: {self.model.id} has {self.model.n_layers} layers (0-{self.model.n_layers - 1}) "
                    f"of {self.model.n_heads} heads (0-{self.model.n_heads - 1}); identify heads on this model first"
                )
        return self

    @classmethod
    def parse(cls, content: Mapping[str, Any], where: str) -> HeadSet:
        """Validate a head set's JSON content; raises HeadSetError that names `where` and the field."""
        if content.get("format") != FORMAT:
            raise HeadSetError(f"{where}: format is {content.get('format')!r}, expected {FORMAT!r}; this version of JuICE reads no other")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise HeadSetError(f"{where}: {field + ': ' if field else ''}{message}") from error

    @classmethod
    def load(cls, path: str | Path) -> HeadSet:
        """Load a head set's folder and verify it; raises HeadSetError."""
        from juice.head_set.storage import load

        return load(Path(path))

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Save to a folder in one step, parents made; raises OutputError, and where it exists unless `overwrite`."""
        from juice.head_set.storage import save

        save(self, Path(path), overwrite=overwrite)

    @classmethod
    def from_pretrained(
        cls,
        repo_id_or_folder: str | Path,
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        force_download: bool = False,
    ) -> HeadSet:
        """Load and verify a head set from a local folder or a hub repository, which goes through the hub's cache.

        `revision` is a branch, tag or commit; without a `token`, the saved one or HF_TOKEN is used. Raises HeadSetNotFoundError
        for what cannot be had (no such repository, no access, no connection) and HeadSetError for a damaged set.
        """
        from juice.head_set.hub import pull

        return pull(repo_id_or_folder, revision=revision, subfolder=subfolder, token=token, force_download=force_download)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Commit this set and a generated model card to the root of a hub repository, made where there is none.

        Returns the commit's URL. An earlier set and card there are replaced. Raises OutputError when the hub refuses it or
        cannot be reached.
        """
        from juice.head_set.hub import push

        return push(self, repo_id, private=private, token=token, commit_message=commit_message, revision=revision, create_pr=create_pr)

    def to_lens_hooks(
        self, *, beta_plus: float | None = None, beta_minus: float | None = None, strength: float = 1.0, method: Method = "juice"
    ) -> LensHooks:
        """Return this set as hooks for TransformerLens: `record` for the clean run, `steer` for the steered one.

        Betas default to the tuned ones. Raises RequestError when there are none, or for a value out of range; a steered run
        without a clean run of the same shape raises UsageError.
        """
        from juice.head_set.lens import to_lens_hooks

        return to_lens_hooks(self, beta_plus=beta_plus, beta_minus=beta_minus, strength=strength, method=method)

    @property
    def chat_template_sha256(self) -> str | None:
        """The hash of the chat template that the heads were found through; None for prompts as they are, and where that is not known."""
        return self.identification.chat_template_sha256 if self.identification else None

    def form_warning(self, used_sha256: str | None) -> str | None:
        """Say how a prompt's form differs from that in which the heads were found; None where it does not.

        The form is the hash of the chat template that a prompt went through, None for one as it is. Nothing is said of a set that was
        made by hand.
        """
        found_sha256 = self.chat_template_sha256
        if self.identification is None or found_sha256 == used_sha256:
            return None
        if found_sha256 is None:
            found, used = "on prompts as they are", "went through a chat template"
        else:
            found = f"through the chat template {short(found_sha256)}"
            used = f"went through {short(used_sha256)}" if used_sha256 else "did not go through one"
        return f"head set {self.name!r} was found {found}, this prompt {used}: it may steer less well"

    def betas(self, method: Method = "juice") -> Betas | None:
        """Return the tuned betas of a method, or None."""
        return getattr(self.beta, method) if self.beta else None

    def validation(self, method: Method = "juice") -> Validation | None:
        """Return what the tuned betas of a method did on their validation examples, or None."""
        measured = self.metrics.get(f"validation_{method}")
        return Validation.model_validate(measured) if measured else None

    def with_betas(self, method: Method, betas: Betas, metrics: Mapping[str, Any]) -> HeadSet:
        """Return this set with the betas of one method set and metrics added."""
        table = (self.beta or BetaTable()).model_copy(update={method: betas})
        return self.model_copy(update={"beta": table, "metrics": {**self.metrics, **metrics}})

    def check_fits(self, model: ModelIdentity) -> None:
        """Raise HeadSetMismatchError unless this set was made for the given model; warn where that cannot be told for sure."""
        difference = self.model.difference(model)
        if difference:
            raise HeadSetMismatchError(
                f"head set {self.name!r} was made for {self.model.id} and does not fit the loaded {model.id}: {difference}; "
                "identify heads on this model (`juice identify`)"
            )
        if not self.model.is_certain(model):
            warnings.warn(
                f"head set {self.name!r} fits {model.id} by architecture and shape alone: there is no fingerprint to compare", stacklevel=3
            )


def short(sha256: str) -> str:
    """Return the beginning of a hash, to tell two apart."""
    kind, colon, digits = sha256.rpartition(":")
    return f"{kind}{colon}{digits[:12]}…"
