"""ServedModel: a model behind an engine, the form of its prompts, and its head sets."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Self, cast

from juice.batching import BatchingEngine
from juice.engine import Capability, Engine, ModelDescription, Steer, Steering
from juice.engine.steering import resolve
from juice.errors import HeadSetError, HeadSetMismatchError, JuiceError, RequestError, UsageError
from juice.head_set import HeadSet, HeadSetLibrary
from juice.head_set.schema import FORMAT, short
from juice.methods import Method, Target, scales_heads
from juice.model.loaded import LoadedModel
from juice.model.prompts import PromptForm, own_template, read_template, sha256_of, user


class ServedModel:
    """The part of a SteeredModel that does not generate."""

    def __init__(
        self,
        engine: Engine,
        head_sets: str | Path | None = None,
        *,
        allow_unverified: bool = False,
    ) -> None:
        self.engine = engine
        self.prompts = PromptForm(engine.description.tokenizer)
        self._head_sets_folder = head_sets
        self._allow_unverified = allow_unverified

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
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
        """The id under which the model was loaded."""
        return self.description.identity.id

    @property
    def description(self) -> ModelDescription:
        """What the model is: its identity, tokenizer, shape and dtype."""
        return self.engine.description

    @property
    def loaded(self) -> LoadedModel:
        """The model's modules and hooks, for finding heads and for analyses.

        Raises:
            MissingCapabilityError: The engine gives no access to them.
        """
        self.engine.require(Capability.ACTIVATIONS)
        return cast("BatchingEngine", self.engine).loaded

    @cached_property
    def head_sets(self) -> HeadSetLibrary:
        """The head sets for this model, looked up on first use.

        Warns of sets that were found through another chat template.
        """
        library = HeadSetLibrary.scan(
            self._head_sets_folder,
            self.description.identity,
            allow_unverified=self._allow_unverified,
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

    def close(self) -> None:
        """Stop the engine and all generations; a model object can then be loaded again."""
        self.engine.close()

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

    def tokenize(self, prompt: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the tokens of a prompt, plain or through the chat template.

        Args:
            prompt: The text.
            add_special_tokens: Only for plain prompts; a chat template writes its own.

        Raises:
            RequestError: The prompt is empty, or not valid Unicode.
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
        """Return the first token of an answer that continues a prompt, or None.

        None means that the answer shares all its tokens with the prompt.
        """
        return self.prompts.first_token(prompt, answer)

    def with_chat_template(self, template: str | Path | None = "default") -> Self:
        """Return the same model, which takes each text prompt as a user's message in a chat.

        Both share the engine.

        Args:
            template: "default" for the tokenizer's own, a file, or the text of a template; None for
                plain prompts.

        Raises:
            UsageError: The tokenizer has no template, the file cannot be read, or the template
                leaves out the message.
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
                    " (--chat-template FILE), or leave out --chat-template "
                    "for plain prompts"
                )
        other = copy(self)
        other.prompts = replace(self.prompts, chat_template=template)
        if (
            template is not None
            and len({other.prompts.rendered([user(word)]) for word in ("lemon", "plum")}) < 2
        ):
            raise UsageError(
                "the chat template leaves out the user's message; "
                "give one that renders its messages"
            )
        return other

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

    @property
    def own_chat_template(self) -> str | None:
        """The text of the tokenizer's chat template; None where it has none."""
        return own_template(self.description.tokenizer)

    @property
    def _own_template_sha256(self) -> str | None:
        return sha256_of(self.own_chat_template)

    def _check_heads(self, head_set: HeadSet) -> None:
        """Raise HeadSetMismatchError for a head that its layer does not have."""
        for head in (*head_set.heads.plus, *head_set.heads.minus):
            n_heads = self.description.heads_per_layer[head.layer]
            if head.index >= n_heads:
                raise HeadSetMismatchError(
                    f"head {head} is out of range: layer {head.layer} of {self.id} has {n_heads}"
                    f" heads (0-{n_heads - 1})"
                )
