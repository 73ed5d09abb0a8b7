"""The functions that a chat offers, as OpenAI's clients send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from juice_server.schemas.documented import Documented
from juice_server.tools.offer import Function, Offer

MAX_TOOLS = 128
# A name stands in grammars and between markers.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class NamedFunction(Documented):
    """The name of a function."""

    name: Name
    """Its name."""


class FunctionTool(NamedFunction):
    """A function, with the JSON schema of its arguments."""

    model_config = ConfigDict(extra="ignore")

    description: str | None = None
    """What it is for."""
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments, an object; without it, it takes none."""
    strict: bool | None = None
    """Whether the arguments must be valid under the schema."""

    @property
    def function(self) -> Function:
        """The same for every protocol."""
        return Function(self.name, self.description, self.parameters, bool(self.strict))


class Tool(Documented):
    """A tool of chats; only functions are served."""

    type: Literal["function"]
    """The kind of tool."""
    function: FunctionTool
    """The function."""


class NamedTool(Documented):
    """A tool by its name, as chats write it."""

    type: Literal["function"]
    """The kind of tool."""
    function: NamedFunction
    """The function."""


class AllowedTools(Documented):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    """Whether one of them must be called."""
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)
    """Their names."""


class AllowedChoice(Documented):
    """The choice of some tools, as chats write it."""

    type: Literal["allowed_tools"]
    """The kind of choice."""
    allowed_tools: AllowedTools
    """The tools."""


class ToolFields(Documented):
    """What a chat offers, and what the answer must do with it."""

    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    """The functions that the answer may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    """Whether it must call one, and which."""
    parallel_tool_calls: bool = True
    """Whether it may have several calls."""

    @model_validator(mode="after")
    def _offers(self) -> ToolFields:
        self.offer()
        return self

    def offer(self) -> Offer | None:
        """Return what is offered; None: nothing. Raises ValueError."""
        choice = self.tool_choice
        functions = [tool.function.function for tool in self.tools or ()]
        if isinstance(choice, NamedTool):
            return offered(functions, "required", [choice.function.name], is_single=True)
        single = not self.parallel_tool_calls
        if isinstance(choice, AllowedChoice):
            allowed = choice.allowed_tools
            names = [tool.function.name for tool in allowed.tools]
            return offered(functions, allowed.mode, names, is_single=single)
        return offered(functions, choice or "auto", is_single=single)


def offered(
    functions: Sequence[Function],
    mode: Literal["none", "auto", "required"],
    allowed: Sequence[str] | None = None,
    *,
    is_single: bool = False,
) -> Offer | None:
    """Return what is offered; None: nothing.

    Args:
        functions: The functions that are listed.
        mode: Whether one of them must be called, or none.
        allowed: The names of those that may be; None: all.
        is_single: Whether one call is the most.

    Raises ValueError where functions are named that are not listed, or have a name in common.
    """
    names = [own.name for own in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two tools are named {twice}")
    if unknown := [name for name in allowed or () if name not in names]:
        raise ValueError(f"tool_choice names {unknown[0]}, which is not among the tools")
    if mode == "required" and not functions:
        raise ValueError("tool_choice asks for a call, but there are no tools")
    if mode == "none" or not functions:
        return None
    only = None if allowed is None else frozenset(allowed)
    return Offer(tuple(functions), only, mode == "required", is_single)
