"""The functions that a chat offers, and the forms in which models write calls of them.

What an answer is read with is a response template of transformers; what a call is enforced with is
a spelling, of which a grammar is made. Both are the common forms, or as the tokenizer says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Function:
    """A function that a model may call.

    `parameters` is the JSON schema of its arguments, an object; None: it takes none. Where it is
    strict, arguments must be valid under the schema.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    is_strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        return self.parameters or {"type": "object", "properties": {}}

    def for_template(self) -> dict[str, Any]:
        """Return the form that chat templates take."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


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
        if self.allowed is None:
            return self.functions
        return tuple(function for function in self.functions if function.name in self.allowed)

    @property
    def is_enforced(self) -> bool:
        """Whether the form of a call is more than what the prompt asks for."""
        return self.must_call or any(function.is_strict for function in self.callable)

    def for_template(self) -> list[dict[str, Any]]:
        """Return the form that chat templates take."""
        return [function.for_template() for function in self.functions]


FormatName = Literal["auto", "hermes", "qwen3_coder", "llama3", "mistral", "json"]


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """The texts around the arguments of calls; `{name}` stands for the function's name.

    Args:
        marker: What tells calls from other text, if anything does.
        begin: What follows it before the first call.
        head: What stands in a call before its arguments.
        tail: What stands after them.
        between: What stands between two calls.
        end: What stands after the last call.
    """

    marker: str = ""
    begin: str = ""
    head: str = '{"name": "{name}", "arguments": '
    tail: str = "}"
    between: str
    end: str = ""


@dataclass(frozen=True, eq=False)
class Format:
    """One way to write calls.

    Args:
        response_template: Reads them, in transformers' words.
        spelling: Writes them; None: they cannot be enforced in this form.
        is_own: Whether the tokenizer brought the template, which then describes whole answers.
    """

    response_template: Mapping[str, Any]
    spelling: Spelling | None = None
    is_own: bool = False


def _reading(**opening_and_closing: str | dict[str, Any]) -> Mapping[str, Any]:
    """Return a response template in which all but the calls is text."""
    calls = {"repeats": True, **opening_and_closing}
    # Answers are read from their own beginning, so nobody looks for the anchor.
    return {"start_anchor": "\0", "fields": {"content": {}, "tool_calls": calls}}


_JSON: dict[str, Any] = {"content": "json", "content_args": {"allow_non_json": True}}
# Without a marker an answer is calls if it begins as one.
_OPENING = r'^\s*(?=(?:\[\s*)?\{\s*"(?:name|type|function)"\s*:)'
_PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

FORMATS: Mapping[str, Format] = {
    "hermes": Format(
        _reading(open="<tool_call>", close="</tool_call>", **_JSON),
        Spelling(
            marker="<tool_call>",
            begin="\n",
            between="\n</tool_call>\n<tool_call>\n",
            end="\n</tool_call>",
        ),
    ),
    "qwen3_coder": Format(
        _reading(
            open_pattern=r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            close_pattern=r"</function>\s*</tool_call>",
            content="xml-inline",
            content_args={"tag_pattern": _PARAMETER},
            transform=_FUNCTION,
        )
    ),
    "llama3": Format(
        _reading(open_pattern=rf"<\|python_tag\|>|{_OPENING}", **_JSON),
        Spelling(head='{"name": "{name}", "parameters": ', between="; "),
    ),
    "mistral": Format(
        _reading(open="[TOOL_CALLS]", close_pattern=r"(?=\[TOOL_CALLS\])", **_JSON),
        Spelling(marker="[TOOL_CALLS]", begin=" [", between=", ", end="]"),
    ),
    "mistral_args": Format(
        _reading(open="[TOOL_CALLS]", close_pattern=r"(?=\[TOOL_CALLS\])", **_JSON),
        Spelling(marker="[TOOL_CALLS]", head="{name}[ARGS]", tail="", between="[TOOL_CALLS]"),
    ),
    "json": Format(
        _reading(open_pattern=_OPENING, **_JSON), Spelling(begin="[", between=", ", end="]")
    ),
}
# Where a chat template has one of these texts, its calls have the form; the first that matches.
_SIGNS = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": ', "llama3"),
)


def format_of(tokenizer: PreTrainedTokenizerBase, chat_template: str, name: FormatName) -> Format:
    """Return how a model writes calls, in the form of a name.

    `auto` finds it: the tokenizer may describe its answers itself (`response_template`), or the
    text of the chat template in use shows calls as the model writes them.
    """
    if name == "mistral":
        return FORMATS["mistral_args" if "[ARGS]" in chat_template else "mistral"]
    if name != "auto":
        return FORMATS[name]
    template = getattr(tokenizer, "response_template", None)
    if template is not None and "tool_calls" in template.get("fields", {}):
        return Format(template, is_own=True)
    found = (form for sign, form in _SIGNS if sign in chat_template)
    return FORMATS[next(found, "json")]
