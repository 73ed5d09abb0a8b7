"""The form of prompts in which examples were made: plain, or through a chat template."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from juice.data.example import ConflictExample
from juice.errors import UsageError
from juice.head_set.schema import short
from juice.model.prompts import sha256_of
from juice.steered_model import SteeredModel


def in_form_of_examples(
    model: SteeredModel, examples: Iterable[ConflictExample], *, is_chosen: bool = False
) -> SteeredModel:
    """Return the same model, which takes prompts as it did when the examples were made.

    A model that already takes them through a template, or whose form was chosen, stays as it is,
    with a warning where the examples say otherwise.

    Args:
        model: The model.
        examples: The examples. Those without the hash of a template say nothing.
        is_chosen: Whether someone chose the model's form.

    Raises:
        UsageError: The examples were made through a template that is not the tokenizer's.
    """
    here, own = model.chat_template_sha256, sha256_of(model.own_chat_template)
    others = {e.chat_template_sha256 for e in examples} - {None, here}
    if not others:
        return model
    found = sorted(short(other) for other in others if other is not None)
    made = f"the examples were made through the chat template {' and '.join(found)}"
    if is_chosen or here is not None:
        ours = f"through {short(here)}" if here else "without one"
        warnings.warn(
            f"{made}, but prompts go {ours}: the model may answer them otherwise", stacklevel=2
        )
        return model
    if others != {own}:
        raise UsageError(
            f"{made}, and that of {model.id} is {short(own) if own else 'none'}; give the file "
            "with --chat-template FILE, or --chat-template none for plain prompts"
        )
    return model.with_chat_template()
