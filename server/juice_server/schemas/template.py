"""What a chat template is given beside the turns."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from juice_server.schemas.documented import Documented
from juice_server.schemas.shared import MAX_KEYS, at_most

# Of transformers' `apply_chat_template` and what it calls, what is no option of a template's own.
TAKEN = frozenset(
    {"self", "conversation", "conversations", "messages", "documents", "tools", "chat_template"}
    | {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"}
    | {"add_generation_prompt", "continue_final_message"}
)


class TemplateOptions(Documented):
    """The template's own options."""

    chat_template_kwargs: Annotated[dict[str, Any] | None, at_most(MAX_KEYS)] = Field(default=None)
    """What else the chat template takes."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_the_templates(cls, options: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := sorted(TAKEN & (options or {}).keys()):
            raise ValueError(
                f"names {taken[0]}, which is no option of the template's own; leave it out"
            )
        return options

    def for_template(self) -> dict[str, Any]:
        """Return what the chat template is given beside messages, documents and functions."""
        return dict(self.chat_template_kwargs or {})


class TemplateFields(TemplateOptions):
    """The template's own options, and how the text ends."""

    add_generation_prompt: bool = True
    """Whether the template begins the assistant's turn."""
    continue_final_message: bool = False
    """Whether the answer goes on with the last turn."""

    def for_template(self) -> dict[str, Any]:
        """Return what the chat template is given beside messages, documents and functions."""
        return {
            **super().for_template(),
            # A turn that goes on is not begun.
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
        }
