"""A model behind an engine: its prompts' form, the head sets that serve it, and where these meet what is asked for."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from juice.batching import BatchingEngine
from juice.engine import Capability, Engine, ModelDescription, Steer, Steering
from juice.engine.steering import resolve
from juice.errors import HeadSetError, HeadSetMismatchError, JuiceError, RequestError, UsageError
from juice.head_set import HeadSet, HeadSetLibrary
from juice.head_set.schema import FORMAT, Method, short
from juice.model.loaded import LoadedModel
from juice.model.prompts import PromptForm, own_template, read_template, sha256_of, user
from juice.targets import Target


class ServedModel:
    """The part of a SteeredModel that does not generate."""

    def __init__(self, engine: Engine, head_sets: str | Path | None = None) -> None:
        self.engine = engine
        self.prompts = PromptForm(engine.description.tokenizer)
        self._head_sets_folder = head_sets

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

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

    @property
    def id(self) -> str:
        """The model's id, as it was loaded."""
        return self.description.identity.id

    @property
    def description(self) -> ModelDescription:
        """What the model is: its tokenizer, its shape, its dtype, who it is."""
        return self.engine.description

    @property
    def loaded(self) -> LoadedModel:
        """The model's own modules and hooks, for finding heads and for analyses.

        Raises:
            MissingCapabilityError: The engine does not give access to them.
        """
        self.engine.require(Capability.ACTIVATIONS)
        return cast("BatchingEngine", self.engine).loaded

    @cached_property
    def head_sets(self) -> HeadSetLibrary:
        """The head sets for this model, looked up at first use.

        Warns of those found through another chat template.
        """
        library = HeadSetLibrary.scan(self._head_sets_folder, self.description.identity)
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

    def close(self) -> None:
        """End the engine with everything that runs; a model that was given as an object can be loaded again."""
        self.engine.close()

    def resolve(self, steer: Steer) -> Steering:
        """Return what a request's rows get: the one place where what is asked for meets the head sets.

        Raises:
            HeadSetError: No set serves the request, or the one given does not fit the model.
            RequestError: The set is for another target, or neither it nor the request has betas.
        """
        form, exact = self.prompts.sha256, self.description.exact
        if steer.target == "none" or steer.method == "cad":
            return resolve(steer, None, exact=exact)
        chosen = steer.head_set
        if isinstance(chosen, HeadSet):
            chosen.check_fits(self.description.identity)
        else:
            chosen = self.head_sets.get(chosen or steer.target)
        self._check_heads(chosen)
        return resolve(steer, chosen, chat_template_sha256=form, exact=exact)

    def tokenize(self, prompt: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return a prompt's tokens: as the tokenizer itself makes them, or through the chat template.

        Args:
            prompt: The text.
            add_special_tokens: For prompts as they are; a template writes its own.

        Raises:
            RequestError: It has no text, or is not valid Unicode.
        """
        if not prompt:
            raise RequestError("the prompt is empty; expected some text", param="prompt")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not text: {error.reason} at character {error.start}; send valid"
                " Unicode",
                param="prompt",
            ) from error
        if not add_special_tokens and self.prompts.chat_template is None:
            return tuple(self.description.tokenizer(prompt, add_special_tokens=False)["input_ids"])
        return self.prompts.tokens(prompt)

    def first_token(self, prompt: str, answer: str) -> int | None:
        """Return the first token of an answer's first word where it continues a prompt; None if it has none of its own."""
        return self.prompts.first_token(prompt, answer)

    def with_chat_template(self, template: str | Path | None = "default") -> Self:
        """Return the same model, its engine shared, taking every prompt that is text as a user's message in a chat.

        Args:
            template: The tokenizer's own ("default"), a file, or a template's text; None: prompts as they are.

        Raises:
            UsageError: The tokenizer has no template, the file cannot be read, or the template leaves the message out.
        """
        if isinstance(template, Path) or (
            template not in (None, "default") and not re.search("{[{%]", template)
        ):
            template = read_template(Path(template))
        elif template == "default":
            template = self.own_chat_template
            if template is None:
                raise UsageError(
                    f"the tokenizer of {self.id} has no chat template; give a Jinja file"
                    " (--chat-template FILE), or leave --chat-template out to take prompts as"
                    " they are"
                )
        other = copy(self)
        other.prompts = replace(self.prompts, chat_template=template)
        if (
            template is not None
            and len({other.prompts.rendered([user(word)]) for word in ("lemon", "plum")}) < 2
        ):
            raise UsageError(
                "the chat template leaves out what the user says; give one that renders the"
                " messages it gets"
            )
        return other

    def in_form_of(self, head_set: HeadSet) -> Self:
        """Return the same model taking prompts in the form in which a head set was found: as they are, or in a chat.

        Raises:
            UsageError: The model was given another form, or its tokenizer's template is not the set's.
        """
        found, here = head_set.chat_template_sha256, self.prompts.sha256
        if head_set.identification is None or found == here:
            return self
        if found is None:
            raise UsageError(
                f"head set {head_set.name!r} was found on prompts as they are; leave"
                " --chat-template out"
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
        beta_plus: float | None = None,
        beta_minus: float | None = None,
        method: Method = "juice",
    ) -> HeadSet:
        """Make a head set by hand for this model.

        Args:
            name: What it is called.
            target: What it pushes toward: `context` or `parametric`.
            plus: The + heads as (layer, head), best first.
            minus: The - heads.
            beta_plus: Scale of the + heads; without betas, every request must give its own.
            beta_minus: Scale of the - heads, 0 or below. A sign that has no heads needs none.
            method: The method that the betas are for.

        Raises:
            HeadSetError: A head is out of range, a beta has the wrong sign, or one of them is missing.
        """
        beta = None
        if beta_plus is not None or beta_minus is not None:
            if (plus and beta_plus is None) or (minus and beta_minus is None):
                raise HeadSetError("one beta is given, the other is missing; give both, or neither")
            beta = {method: {"plus": beta_plus or 0.0, "minus": beta_minus or 0.0}}
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
        return HeadSet.parse(content, f"head set {name!r}")

    @property
    def own_chat_template(self) -> str | None:
        """The text of the tokenizer's chat template; None where it has none."""
        return own_template(self.description.tokenizer)

    @property
    def _own_template_sha256(self) -> str | None:
        return sha256_of(self.own_chat_template)

    def _check_heads(self, head_set: HeadSet) -> None:
        """Raise HeadSetMismatchError for a head that its layer does not have: layers of one model may differ."""
        for head in (*head_set.heads.plus, *head_set.heads.minus):
            n_heads = self.description.heads_per_layer[head.layer]
            if head.index >= n_heads:
                raise HeadSetMismatchError(
                    f"head {head} is out of range: layer {head.layer} of {self.id} has {n_heads}"
                    f" heads (0-{n_heads - 1})"
                )
