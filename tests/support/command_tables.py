"""The options of each command as a table, from what `--help` shows.

Options that several commands share (how a model is loaded, which engine runs it) have one table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from typer.core import TyperGroup
from typer.main import get_command

from juice.cli.main import app
from juice.options import EngineOptions, LoadOptions

LOADING = {"model", *LoadOptions.model_fields}
ENGINE = {"vllm_args", *EngineOptions.model_fields}


def commands() -> dict[str, Any]:
    """Return the commands by name."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return group.commands


def tables() -> dict[str, str]:
    """Return each table by what it is of: `juice generate`, `loading` or `engine`."""
    own = commands()
    found = {
        "loading": _table(p for p in own["doctor"].params if p.name in LOADING),
        "engine": _table(p for p in own["doctor"].params if p.name in ENGINE),
    }
    for name, command in own.items():
        is_loading = any(p.name == "device" for p in command.params)
        shared = LOADING | ENGINE if is_loading else set()
        rest = [p for p in command.params if p.name not in shared]
        found[f"juice {name}"] = _table(rest)
    return found


def _table(parameters: Iterable[Any]) -> str:
    rows = [f"| {_names(own)} | {_default(own)} | {_what(own)} |" for own in parameters]
    return "\n".join(["| option | default | what |", "|---|---|---|", *rows])


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str | Path):
        return f"`{value}`"
    return f"{value:g}"


def _what(parameter: Any) -> str:
    """Return the help with its choices; flags in it are set as code."""
    text = re.sub(
        r"(?<![\w`-])(--[a-z][a-z-]*(?:=\S+?(?=[.,;]?(?:\s|$)))?)", r"`\1`", parameter.help
    )
    annotation = parameter.type_descriptor.annotation
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        if not set(choices) <= set(re.findall(r"\w+", text)):
            text = f"{text} One of {', '.join(f'`{own}`' for own in choices)}."
    return text.replace("|", r"\|")
