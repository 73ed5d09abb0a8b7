"""How models write calls of functions: in one of the common forms, or as their tokenizer says.

What an answer is read with is a response template of transformers; what a call is enforced with is
a spelling, of which a grammar is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    """Return how a model writes calls.

    Args:
        tokenizer: The model's, which may describe its answers itself (`response_template`).
        chat_template: The text of the template in use, which shows calls as the model writes them.
        name: The form, or `auto` to find it.
    """
    if name == "mistral":
        return FORMATS["mistral_args" if "[ARGS]" in chat_template else "mistral"]
    if name != "auto":
        return FORMATS[name]
    own = getattr(tokenizer, "response_template", None)
    if own is not None and "tool_calls" in own.get("fields", {}):
        return Format(own, is_own=True)
    found = (form for sign, form in _SIGNS if sign in chat_template)
    return FORMATS[next(found, "json")]
