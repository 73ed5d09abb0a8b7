"""ServedModel: a model behind an engine, and the form of its prompts."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Self, cast

from juice.batching import BatchingEngine
from juice.engine import Capability, Engine, ModelDescription
from juice.errors import RequestError, UsageError
from juice.model.loaded import LoadedModel
from juice.model.prompts import PromptForm, own_template, read_template, sha256_of, user


class ServedModel:
    """The part of a SteeredModel that neither steers nor generates."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.prompts = PromptForm(engine.description.tokenizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

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

    def close(self) -> None:
        """Stop the engine and all generations; a model object can then be loaded again."""
        self.engine.close()

    def tokenize(
        self, prompt: str, *, opening: str = "", add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Return the tokens of a prompt, plain or through the chat template.

        Args:
            prompt: The text.
            opening: Words with which the reply begins; they are the model's own in a chat.
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
            text = f"{prompt} {opening}" if opening else prompt
            return tuple(self.description.tokenizer(text, add_special_tokens=False)["input_ids"])
        return self.prompts.tokens(prompt, opening)

    def first_token(self, prompt: str, answer: str, *, opening: str = "") -> int | None:
        """Return the first token of an answer that continues a prompt and an opening, or None.

        None means that the answer shares all its tokens with what is before it.
        """
        return self.prompts.first_token(prompt, answer, opening)

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

    @property
    def chat_template_sha256(self) -> str | None:
        """The hash of the chat template that text prompts go through; None for plain prompts."""
        return self.prompts.sha256

    @property
    def own_chat_template(self) -> str | None:
        """The text of the tokenizer's chat template; None where it has none."""
        return own_template(self.description.tokenizer)

    @property
    def _own_template_sha256(self) -> str | None:
        return sha256_of(self.own_chat_template)
