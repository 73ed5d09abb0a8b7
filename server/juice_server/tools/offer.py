"""The functions that a chat offers to the model, the same for every protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Function:
    """A function that a model may call.

    Args:
        name: Its name.
        description: What it is for.
        parameters: The JSON schema of its arguments, an object; None: it takes none.
        is_strict: Whether its arguments must be valid under the schema.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    is_strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its arguments."""
        return self.parameters or {"type": "object", "properties": {}}

    def for_template(self) -> dict[str, Any]:
        """Return the form that chat templates take."""
        own = {"name": self.name, "description": self.description, "parameters": self.parameters}
        given = {name: value for name, value in own.items() if value is not None}
        return {"type": "function", "function": given}


@dataclass(frozen=True, eq=False)
class Offer:
    """The functions that a chat lists, and what the answer may do with them.

    Args:
        functions: Those that the prompt lists.
        allowed: The names of those that may be called; None: all.
        must_call: Whether the answer is a call.
        is_single: Whether it has one call at most.
    """

    functions: tuple[Function, ...]
    allowed: frozenset[str] | None = None
    must_call: bool = False
    is_single: bool = False

    @property
    def callable(self) -> tuple[Function, ...]:
        """The functions that may be called."""
        allowed = self.allowed
        return tuple(own for own in self.functions if allowed is None or own.name in allowed)

    @property
    def is_enforced(self) -> bool:
        """Whether the form of a call is more than what the prompt asks for."""
        return self.must_call or any(own.is_strict for own in self.callable)

    def for_template(self) -> list[dict[str, Any]]:
        """Return the form that chat templates take."""
        return [own.for_template() for own in self.functions]
