"""SteerableModel: a model with its head sets, and what they make of a request's wish to steer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Self

from juice.engine import Engine, Steer, Steering
from juice.engine.steering import resolve
from juice.errors import HeadSetError, HeadSetMismatchError, JuiceError, UsageError
from juice.head_set import HeadSet, HeadSetLibrary
from juice.head_set.schema import FORMAT, short
from juice.methods import Method, Target, scales_heads
from juice.steered_model.served import ServedModel


class SteerableModel(ServedModel):
    """The part of a SteeredModel that steers, but does not generate."""

    def __init__(
        self,
        engine: Engine,
        head_sets: str | Path | None = None,
        *,
        allow_unverified: bool = False,
    ) -> None:
        super().__init__(engine)
        self._head_sets_folder = head_sets
        self._allow_unverified = allow_unverified

    def __repr__(self) -> str:
        own = self.description
        shape = (
            f"{own.identity.architecture}, {own.n_layers} layers of {own.identity.n_heads} heads"
        )
        try:
            with warnings.catch_warnings(action="ignore"):
                sets = ", ".join(sorted(self.head_sets.by_name)) or "none"
        except JuiceError as error:
            sets = f"none ({error})"
        return (
            f"<SteeredModel {self.id!r}: {shape}, {own.dtype} on {own.device}; head sets: {sets}>"
        )

    @cached_property
    def head_sets(self) -> HeadSetLibrary:
        """The head sets for this model, looked up on first use.

        Warns of sets that were found through another chat template.
        """
        library = HeadSetLibrary.scan(
            self._head_sets_folder,
            self.description.identity,
            allow_unverified=self._allow_unverified,
            layers=self.engine.steerable_layers,
        )
        own = self._own_template_sha256
        for head_set in library.by_name.values():
            found = head_set.chat_template_sha256
            if found is not None and found not in (own, self.prompts.sha256):
                warnings.warn(
                    f"head set {head_set.name!r} was found through the chat template"
                    f" {short(found)}, that of {self.id} is {short(own) if own else 'none'}: it may"
                    " steer less well",
                    stacklevel=2,
                )
        return library

    def with_head_sets(self, library: HeadSetLibrary) -> Self:
        """Return the same model with other head sets; both share the engine."""
        other = copy(self)
        other.head_sets = library
        return other

    def resolve(self, steer: Steer, *, first_position: int = 0) -> Steering:
        """Return the steering of a request: its head set, and the betas of each head.

        Args:
            steer: What the request asks for.
            first_position: The first token that is steered.

        Raises:
            HeadSetError: No head set serves the request, or the given one does not fit the model.
            RequestError: The head set has another target, or neither it nor the request has betas.
        """
        return resolve(
            steer,
            self.head_set_of(steer),
            chat_template_sha256=self.prompts.sha256,
            first_position=first_position,
            exact=self.description.exact,
        )

    def head_set_of(self, steer: Steer) -> HeadSet | None:
        """Return the head set of a request; None where it uses no heads.

        Raises HeadSetError where none serves the request, or the given one does not fit the model.
        """
        if steer.target == "none" or not scales_heads(steer.method):
            return None
        if isinstance(steer.head_set, HeadSet):
            chosen = steer.head_set
            self.check_fits(chosen)
        else:
            chosen = self.head_sets.get(steer.target if steer.head_set is None else steer.head_set)
        self._check_heads(chosen)
        return chosen

    def check_fits(self, head_set: HeadSet) -> None:
        """Raise HeadSetMismatchError unless a head set may steer this model."""
        # A set that was made with this very model needs no fingerprint to be known.
        if head_set.model is not self.description.identity:
            head_set.check_fits(self.description.identity, allow_unverified=self._allow_unverified)

    def in_form_of(self, head_set: HeadSet) -> Self:
        """Return the same model, which takes prompts as a head set was found: plain, or in a chat.

        Raises:
            UsageError: The model takes another form, or the tokenizer has another template.
        """
        found, here = head_set.chat_template_sha256, self.prompts.sha256
        if head_set.identification is None or found == here:
            return self
        if found is None:
            raise UsageError(
                f"head set {head_set.name!r} was found on plain prompts; leave out --chat-template"
            )
        own = self._own_template_sha256
        if here is None and own == found:
            return self.with_chat_template()
        given = (
            f"the one given is {short(here)}"
            if here
            else f"the tokenizer's own is {short(own) if own else 'none'}"
        )
        raise UsageError(
            f"head set {head_set.name!r} was found through the chat template {short(found)},"
            f" {given}; give the set's own file with --chat-template FILE"
        )

    def make_head_set(
        self,
        *,
        name: str,
        target: Target,
        plus: Sequence[tuple[int, int]] = (),
        minus: Sequence[tuple[int, int]] = (),
        beta_plus: float | Sequence[float] | None = None,
        beta_minus: float | Sequence[float] | None = None,
        method: Method = "juice",
    ) -> HeadSet:
        """Make a head set by hand for this model.

        Args:
            name: Its name.
            target: `context` or `parametric`.
            plus: The + heads as (layer, head), best first.
            minus: The - heads.
            beta_plus: Scale of the + heads, 0 or more, or one for each of them; without betas, each
                request must give them.
            beta_minus: Scale of the - heads, 0 or less, or one for each. A sign without heads needs
                no beta.
            method: The method of the betas.

        Raises:
            HeadSetError: A head is out of range, or a beta has the wrong sign or is missing.
        """
        beta = None
        if beta_plus is not None or beta_minus is not None:
            if (plus and beta_plus is None) or (minus and beta_minus is None):
                raise HeadSetError("one beta is given, the other is missing; give both, or neither")
            is_per_head = any(isinstance(b, Sequence) for b in (beta_plus, beta_minus))
            none: list[float] | float = [] if is_per_head else 0.0
            beta = {
                method: {
                    "plus": none if beta_plus is None else beta_plus,
                    "minus": none if beta_minus is None else beta_minus,
                }
            }
        content = {
            "format": FORMAT,
            "name": name,
            "target": target,
            "model": self.description.identity.model_dump(),
            "heads": {
                "plus": [list(head) for head in plus],
                "minus": [list(head) for head in minus],
            },
            "beta": beta,
        }
        made = HeadSet.parse(content, f"head set {name!r}")
        return made.model_copy(update={"model": self.description.identity})

    def _check_heads(self, head_set: HeadSet) -> None:
        """Raise HeadSetMismatchError for a head that its layer does not have."""
        for head in (*head_set.heads.plus, *head_set.heads.minus):
            n_heads = self.description.heads_per_layer[head.layer]
            if head.index >= n_heads:
                raise HeadSetMismatchError(
                    f"head {head} is out of range: layer {head.layer} of {self.id} has {n_heads}"
                    f" heads (0-{n_heads - 1})"
                )
