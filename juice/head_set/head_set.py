"""A head set as users see it: its content, and how to load, change, save and share it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import ValidationError

from juice.errors import (
    HeadSetError,
    HeadSetMismatchError,
    HeadSetNotFoundError,
    RequestError,
    first_problem,
)
from juice.formula import METHODS, Method
from juice.head_set import hub, storage
from juice.head_set.lens import LensHooks, lens_hooks
from juice.head_set.schema import (
    FIRST_FORMAT,
    Betas,
    Content,
    Gate,
    Head,
    HeadLists,
    Intervention,
    ModelIdentity,
    check_scale,
    public_id,
    sealed,
    short,
    upgraded,
)
from juice.head_set.scores import HeadScores

# The seals of the sets that come with JuICE for weights that nobody recorded.
PUBLISHED = frozenset({"sha256:6dfa721e2ef107762ec55c5cffff699bbb6e1ea8a5653a91931f0930d72e8862"})


class HeadSet(Content):
    """The heads that steer a model toward a target, and how strongly.

    Immutable, and valid once it exists: its heads are within the model that it names, each sign
    lists a head once, betas are finite and of the right sign.

    Args:
        name: What requests call it: up to 64 letters, digits, dots, dashes and underscores.
        target: What wins a conflict: `context` or `parametric`.
        source: Where the heads were published.
        model: Which model it is for.
        method: The method that serves requests that name none.
        methods: The heads, betas and gate of each method.
        identification: How the heads were found; None where they were not.
        metrics: What the betas did on their validation examples, and other numbers.
        scores_sha256: The hash of the scores' file; None without scores.
        scores: The scores that the heads were chosen from.
    """

    def __repr__(self) -> str:
        signs = (("+", self.heads.plus), ("-", self.heads.minus))
        heads = " ".join(f"{sign}{head}" for sign, signed in signs for head in signed)
        betas = self.betas()
        tuned = f"betas {betas}" if betas else "untuned"
        return f"<HeadSet {self.name!r} toward {self.target} for {self.model.id}: {heads}; {tuned}>"

    __str__ = __repr__

    @classmethod
    def parse(cls, content: Mapping[str, Any], where: str) -> Self:
        """Return the head set of JSON content, of any format; HeadSetError names `where`."""
        try:
            text = json.dumps(upgraded(content, where), default=_plain)
            return cls.model_validate_json(text, strict=True)
        except TypeError as error:
            raise HeadSetError(f"{where}: {error}") from error
        except ValidationError as error:
            field, problem = first_problem(error)
            raise HeadSetError(f"{where}: {field + ': ' if field else ''}{problem}") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load and verify a head set's folder; raises HeadSetError.

        Warns of a set of the first format, which has no hash over the whole of it.
        """
        folder = Path(path)
        file = folder / storage.JSON_FILE
        try:
            content, data = storage.read(folder)
            head_set = cls.parse(content, str(file))
        except RecursionError as error:
            raise HeadSetError(f"{file} is nested too deeply for a head set") from error
        if content["format"] == FIRST_FORMAT:
            warnings.warn(
                f"{file} is of the first format, in which a changed head or beta cannot be seen; "
                "load and save it once to seal it",
                stacklevel=2,
            )
        if data is None:
            return head_set
        scores = HeadScores.parse(data, folder / str(storage.scores_name(content)))
        expected = (head_set.model.n_layers, head_set.model.n_heads)
        if scores.plus.shape[1:] != expected:
            raise HeadSetError(
                f"{folder} holds scores of shape {list(scores.plus.shape)}; "
                f"the model has (n_layers, n_heads) = {expected}"
            )
        if scores.target != head_set.target:
            raise HeadSetError(
                f"{folder} holds scores toward {scores.target}; the head set's target is "
                f"{head_set.target}"
            )
        return head_set.model_copy(update={"scores": scores})

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Save to a folder in one step and make its parents.

        Raises OutputError where that fails, or a set is there that must not be overwritten.
        """
        storage.save(self.to_files(), Path(path), overwrite=overwrite)

    def to_files(self) -> dict[str, bytes]:
        """Return the files of this set's folder by name, the one that commits it last."""
        scores = None if self.scores is None else self.scores.to_bytes()
        return storage.files_of(self.model_dump(mode="json"), scores)

    @classmethod
    def from_pretrained(
        cls,
        repo_id_or_folder: str | Path,
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        force_download: bool = False,
    ) -> Self:
        """Load and verify a head set from a local folder or, through the cache, from the hub.

        Args:
            repo_id_or_folder: A hub id such as owner/name, or a folder.
            revision: A branch, tag or commit.
            subfolder: The set's folder in the repository; None: its root.
            token: A hub token; None: the saved one, or HF_TOKEN.
            force_download: Download again what is in the cache.

        Raises:
            HeadSetNotFoundError: There is no such folder or repository, no access or no connection.
            HeadSetError: The set is damaged.
        """
        name = str(repo_id_or_folder)
        if Path(name).is_dir():
            return cls.load(Path(name) / (subfolder or ""))
        if isinstance(repo_id_or_folder, Path) or name.startswith((".", "/", "~")):
            raise HeadSetNotFoundError(
                f"there is no folder {name}; "
                "give a head set's folder, or a hub id such as owner/name"
            )
        folder = hub.pull(
            name, revision=revision, subfolder=subfolder, token=token, force_download=force_download
        )
        try:
            return cls.load(folder)
        except HeadSetError as error:
            raise HeadSetError(
                f"the head set {name} cannot be used: {error}; "
                "download it again (--force, force_download=True), or tell its author"
            ) from error

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
        """Commit this set and a generated model card to the root of a hub repository.

        An earlier set and card there are replaced.

        Args:
            repo_id: The repository, such as owner/name; created if missing.
            private: Make a new repository private.
            token: A hub token; None: the saved one, or HF_TOKEN.
            commit_message: The commit's message; None: one that names the set.
            revision: The branch to commit to.
            create_pr: Open a pull request instead.

        Returns:
            The commit's URL.

        Raises:
            OutputError: The hub refuses the commit or cannot be reached.
        """
        # A model's path on this machine is nobody else's business.
        model = self.model.model_copy(update={"id": public_id(self.model.id)})
        public = self.model_copy(update={"model": model})
        return hub.push(
            public,
            public.to_files(),
            repo_id,
            private=private,
            token=token,
            commit_message=commit_message or f"Upload the head set {self.name} of {model.id}",
            revision=revision,
            create_pr=create_pr,
        )

    @property
    def seal(self) -> str:
        """The hash of the whole set, that of its scores included."""
        return sealed(self.model_dump(mode="json"))

    @property
    def chat_template_sha256(self) -> str | None:
        """The hash of the chat template of the heads' prompts; None: plain ones, or unknown."""
        return self.identification.chat_template_sha256 if self.identification else None

    @property
    def heads(self) -> HeadLists:
        """The heads of the default method, of each sign, best first."""
        return self.intervention().heads

    @property
    def all_heads(self) -> tuple[Head, ...]:
        """The heads of all methods and signs, each once, in order."""
        given = self.methods.given.values()
        return tuple(sorted({head for one in given for head in one.heads.all}))

    @property
    def layers(self) -> list[int]:
        """The layers that the default method steers: by its betas, or with all heads without."""
        if self.betas() is None:
            return sorted({head.layer for head in self.heads.all})
        return sorted(self.coefficients())

    def intervention(self, method: Method | None = None) -> Intervention:
        """Return the heads, betas and gate of a method or the default one; raises RequestError."""
        intervention = self.methods.given.get(method or self.method)
        if intervention is None:
            raise RequestError(
                f"head set {self.name!r} has no heads for method {method!r}; it has "
                f"{' and '.join(self.methods.given)}: name that, or leave the method out",
                param="steer.method",
            )
        return intervention

    def betas(self, method: Method | None = None) -> Betas | None:
        """Return the tuned betas of a method, or None; of the default one where none is named."""
        intervention = self.methods.given.get(method or self.method)
        return intervention.betas if intervention else None

    def gate(self, method: Method | None = None) -> Gate | None:
        """Return the gate of a method, which says when its tuned betas should steer, or None."""
        intervention = self.methods.given.get(method or self.method)
        return intervention.gate if intervention else None

    def applied_betas(
        self,
        method: Method | None = None,
        *,
        beta_plus: float | None = None,
        beta_minus: float | None = None,
    ) -> Betas:
        """Return the betas that a request gives, else the tuned ones.

        Raises RequestError where a sign with heads has neither, or each head has a tuned beta of
        its own and others are given.
        """
        intervention = self.intervention(method)
        heads, tuned = intervention.heads, intervention.betas
        given = {"plus": beta_plus, "minus": beta_minus}
        if tuned is not None and tuned.is_per_head:
            for sign, value in given.items():
                if value is not None:
                    raise RequestError(
                        f"beta_{sign} is given, but each head of the set {self.name!r} has a beta "
                        "of its own; drop it, and scale all of them with strength",
                        param=f"steer.beta_{sign}",
                    )
            return tuned
        for sign, signed in heads:
            if given[sign] is None:
                # A sign without heads needs no beta: it would scale nothing.
                given[sign] = getattr(tuned, sign, None if signed else 0.0)
            if given[sign] is None:
                raise RequestError(
                    f"head set {self.name!r} has no betas for method {method or self.method!r}; "
                    "give beta_plus and beta_minus (--beta-plus, --beta-minus), or set them with "
                    "`juice tune`",
                    param=f"steer.beta_{sign}",
                )
        return Betas.model_validate(given)

    def coefficients(
        self, method: Method | None = None, betas: Betas | None = None, strength: float = 1.0
    ) -> dict[int, torch.Tensor]:
        """Return the coefficients of z in each steered layer, float32 [n_heads].

        They are those of a method (None: the default one), from betas (None: the tuned ones) that
        strength multiplies. Raises RequestError where there are no betas.
        """
        betas = betas or self.applied_betas(method)
        return self.intervention(method).coefficients(betas, strength, self.model.n_heads)

    def to_lens_hooks(
        self,
        *,
        beta_plus: float | None = None,
        beta_minus: float | None = None,
        strength: float = 1.0,
        method: Method | None = None,
    ) -> LensHooks:
        """Return TransformerLens hooks: `record` for the clean run, `steer` for the steered run.

        Args:
            beta_plus: Scale of the + heads; None: the tuned one.
            beta_minus: Scale of the - heads; None: the tuned one.
            strength: Multiplies both betas.
            method: `juice`, or `june` for the single run, which records nothing; None: the set's.

        Raises:
            RequestError: There are no betas, or a value is out of range.
            UsageError: Raised by a steered run without a clean run of the same shape.
        """
        if method is not None and method not in METHODS:
            raise RequestError(
                f"method is {method!r}; expected juice or june", param="steer.method"
            )
        check_scale("strength", strength)
        check_scale("beta_plus", beta_plus)
        check_scale("beta_minus", beta_minus)
        betas = self.applied_betas(method, beta_plus=beta_plus, beta_minus=beta_minus)
        return lens_hooks(self.coefficients(method, betas, strength), method or self.method)

    def having(self, method: Method) -> Self:
        """Return this set with a method; one that it lacks gets the heads of the default one."""
        if method in self.methods.given:
            return self
        return self._with(method, Intervention(heads=self.heads))

    def with_betas(self, method: Method, betas: Betas) -> Self:
        """Return this set, `having` a method, with its betas, and without what others of it did."""
        heads = self.having(method).intervention(method).heads
        kept = {k: v for k, v in self.metrics.items() if k != f"validation_{method}"}
        return self._with(method, Intervention(heads=heads, betas=betas), metrics=kept)

    def with_gate(self, method: Method, gate: Gate | None) -> Self:
        """Return this set with another gate for the betas of a method, or without one."""
        return self._with(method, self.intervention(method).model_copy(update={"gate": gate}))

    def _with(self, method: Method, intervention: Intervention, **others: Any) -> Self:
        methods = self.methods.model_copy(update={method: intervention})
        return self.model_copy(update={"methods": methods, **others})

    def with_metrics(self, metrics: Mapping[str, Any]) -> Self:
        """Return this set with metrics added."""
        return self.model_copy(update={"metrics": {**self.metrics, **metrics}})

    def form_warning(self, used_sha256: str | None) -> str | None:
        """Return a warning if a prompt's form is not the one the heads were found in, else None.

        The form is the hash of the prompt's chat template, None for a plain one. A set that was
        made by hand gives no warning.
        """
        tuned_sha256 = self.chat_template_sha256
        if self.identification is None or tuned_sha256 == used_sha256:
            return None
        if tuned_sha256 is None:
            tuned_form, used = "on plain prompts", "went through a chat template"
        else:
            tuned_form = f"through the chat template {short(tuned_sha256)}"
            used = f"went through {short(used_sha256)}" if used_sha256 else "did not go through one"
        return (
            f"head set {self.name!r} was found {tuned_form}, but this prompt {used}: "
            "it may steer less well"
        )

    def check_fits(self, model: ModelIdentity, *, allow_unverified: bool = False) -> None:
        """Raise HeadSetMismatchError unless this set was made for the given model.

        Where one of them has no fingerprint, only architecture and shape can be compared. That is
        enough, with a warning, for a set that comes with JuICE as its authors published it, and
        for any set with `allow_unverified`; so is the same model in another quantisation.
        """
        certain = self.model.is_certain(model)
        other = "identify heads on this model (`juice identify`), or " * bool(model.fingerprint)
        if requantised := self.model.requantised(model):
            guess = f"head set {self.name!r} was made on {self.model.id} {requantised}"
        elif difference := self.model.difference(model):
            raise HeadSetMismatchError(
                f"head set {self.name!r} was made for {self.model.id} and does not fit the loaded "
                f"{model.id}: {difference}; identify heads on this model (`juice identify`)"
            )
        elif certain:
            return
        else:
            guess = (
                f"head set {self.name!r} fits {model.id} by architecture and shape alone: "
                f"the {'set' if model.fingerprint else 'model'} has no fingerprint to compare"
            )
        if not allow_unverified and (certain or self.seal not in PUBLISHED):
            raise HeadSetMismatchError(
                f"{guess}; {other}take it on trust with --allow-unverified "
                "(allow_unverified=True, JUICE_ALLOW_UNVERIFIED=true)"
            )
        warnings.warn(guess, stacklevel=3)


def _plain(number: Any) -> Any:
    """Return a number of NumPy or PyTorch as one of Python."""
    if not hasattr(number, "item"):
        raise TypeError(f"{number!r} is a {type(number).__name__}; expected plain data")
    return number.item()
