"""One prompt with its context apart: what the routes that look inside are asked about."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import Field, model_validator

from juice.engine import SteerTarget
from juice.methods import TARGETS, Target
from juice_server.schemas.openai import Document
from juice_server.schemas.shared import MAX_PROMPTS, Body, at_most
from juice_server.schemas.turns import Message
from juice_server.tools.offer import Offer


class Question(Body):
    """A prompt, or the messages of a chat; `context` goes before it, or before the last words."""

    prompt: str | None = None
    """A text."""
    messages: Annotated[list[Message] | None, Field(min_length=1, max_length=4096)] = None
    """The turns of a chat, in place of a text."""
    context: str | None = None
    """What goes before the prompt, or before the last user's message."""
    documents: Annotated[list[Document] | None, Field(max_length=MAX_PROMPTS)] = None
    """Documents, which go where the chat template puts them, in place of a context."""

    @model_validator(mode="after")
    def _one_of_each(self) -> Question:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give a prompt, or messages")
        if self.documents is not None and (self.context is not None or self.messages is None):
            raise ValueError("documents go with messages, without a context")
        return self

    @property
    def is_chat(self) -> bool:
        """Whether it goes through the chat template."""
        return self.messages is not None

    def offer(self) -> Offer | None:
        """Return the functions that an answer may call: none."""
        return None


class NamedHeadSets(Body):
    """Which head sets steer."""

    head_sets: Annotated[dict[Target, str] | None, at_most(2)] = None
    """The head set of each target, by name; else the set named after the target."""

    def head_set_of(self, target: SteerTarget) -> str | None:
        """Return the name of the head set that was given for a target."""
        return None if target == "none" else (self.head_sets or {}).get(target)

    def targets(self, served: Collection[str]) -> list[Target]:
        """Return the targets that can be steered to: those served, and those with a named set."""
        return [own for own in TARGETS if own in served or self.head_set_of(own) is not None]
