"""The parts of the reference that come from the code: nothing of them is kept in git.

`http_page` has every route, field, bound, default and status, from the OpenAPI document;
`option_tables` has the options of each command, from what `--help` shows.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from math import log2
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from typer.core import TyperGroup
from typer.main import get_command

from juice.cli.main import app
from juice.engine.load_options import EngineOptions, LoadOptions
from juice_server.app import create
from juice_server.settings import Settings

BEGINNING = """\
# HTTP, field by field

Every route with its fields, defaults, bounds and statuses, written from the schema that a server
has at `/openapi.json`. [HTTP](http.md) explains what the fields do. A server may be set to [tighter
bounds](settings.md#limits-of-one-request).
"""
REFUSES = "Unknown fields are refused."
POWERS = {63, 31}  # bounds that say how many bits a number has
# What is counted, and the keys of its lowest and highest value.
RANGES = (
    ("", "minimum", "maximum"),
    (" character", "minLength", "maxLength"),
    (" item", "minItems", "maxItems"),
)
PLAIN = {"string", "number", "integer", "boolean", "object"}
Schema = dict[str, Any]
LOADING = {"model", *LoadOptions.model_fields}
ENGINE = {"vllm_args", *EngineOptions.model_fields}


def http_page() -> str:
    """Return the page of the running version."""
    document = create(Settings()).openapi()
    schemas = document["components"]["schemas"]
    routes = [
        (f"{method.upper()} {path}", route)
        for path, methods in document["paths"].items()
        for method, route in methods.items()
    ]
    parts = [BEGINNING, "## Routes\n"]
    parts += [_route(name, route, schemas) for name, route in routes]
    parts += ["## Objects\n", *_objects([route for _, route in routes], schemas)]
    parts.append(_statuses([route for _, route in routes]))
    return "\n".join(parts)


def _route(name: str, route: Schema, schemas: dict[str, Schema]) -> str:
    lines = [f"### {name}", "", _prose(route["description"]), ""]
    if parameters := route.get("parameters"):
        rows = {one["name"]: {**one["schema"], **one} for one in parameters}
        lines += [_fields({"properties": rows, "required": list(rows)}), ""]
    if body := route.get("requestBody"):
        schema = schemas[_named(_json_of(body))]
        lines += [_fields(schema), "", *([REFUSES, ""] if _is_strict(schema) else [])]
    success = next(one for status, one in route["responses"].items() if status.startswith("2"))
    for kind, answer in success.get("content", {}).items():
        if "$ref" in answer["schema"]:
            lines += [f"It answers {_type(answer['schema'])}.", ""]
        elif kind != "application/json":
            lines += [f"It answers `{kind}`.", ""]
    lines += [f"[Statuses](#statuses): {', '.join(route['responses'])}.", ""]
    return "\n".join(lines)


def _objects(routes: list[Schema], schemas: dict[str, Schema]) -> Iterator[str]:
    """Yield the objects that bodies and answers are made of, by their names."""
    bodies = {_named(_json_of(route["requestBody"])) for route in routes if "requestBody" in route}
    for name, schema in sorted(schemas.items(), key=lambda item: _title(item[0]).lower()):
        if name in bodies:
            continue
        text = schema.get("description", "") + (f" {REFUSES}" if _is_strict(schema) else "")
        yield f"### {_title(name)}\n\n{_prose(text)}\n\n{_fields(schema)}\n"


def _statuses(routes: list[Schema]) -> str:
    """Return the table of statuses; a status means the same on every route."""
    means: dict[str, set[str]] = {}
    for route in routes:
        for status, answer in route["responses"].items():
            means.setdefault(status, set()).add(answer["description"])
    means["200"] = {"The answer."}
    rows = [f"| {status} | {' '.join(sorted(texts))} |" for status, texts in sorted(means.items())]
    return "\n".join(["## Statuses", "", "| status | when |", "|---|---|", *rows, ""])


def _fields(schema: Schema) -> str:
    required = schema.get("required", ())
    rows = [
        f"| `{name}` | {_type(field)} | {_default(field, is_required=name in required)} "
        f"| {_bounds(field)} | {_cell(field.get('description', ''))} |"
        for name, field in schema.get("properties", {}).items()
    ]
    return "\n".join(["| field | type | default | bounds | what |", "|---|---|---|---|---|", *rows])


def _type(schema: Schema) -> str:
    """Return a type in words, objects with a link to their fields."""
    if "$ref" in schema:
        title = _title(_named(schema))
        return f"[{title}](#{title.lower().replace(' ', '-')})"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    for union in ("anyOf", "oneOf"):
        if union in schema:
            kinds = dict.fromkeys(_type(one) for one in schema[union] if one.get("type") != "null")
            is_optional = any(one.get("type") == "null" for one in schema[union])
            return " or ".join([*kinds, *(["null"] if is_optional else [])])
    if schema.get("type") == "array":
        if first := schema.get("prefixItems"):
            return f"list of {len(first)} {_several(first[0])}"
        return f"list of {_several(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_several(schema['additionalProperties'])}"
    return str(schema.get("type", "anything"))


def _several(schema: Schema) -> str:
    one = _type(schema)
    return f"{one}s" if one in PLAIN else one


def _default(schema: Schema, *, is_required: bool) -> str:
    if "default" in schema:
        return f"`{json.dumps(schema['default'])}`"
    if is_required:
        return "required"
    return "`null`" if any(one.get("type") == "null" for one in schema.get("anyOf", ())) else ""


def _bounds(schema: Schema) -> str:
    """Return the bounds of a value, and those of its parts."""
    parts = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    found = dict.fromkeys(
        bound for part in parts if "prefixItems" not in part for bound in _ranges(part)
    )
    items = [
        part[key] for part in parts for key in ("items", "additionalProperties") if key in part
    ]
    inner = dict.fromkeys(
        f"each {bound}" for item in items if isinstance(item, dict) if (bound := _bounds(item))
    )
    return ", ".join([*found, *inner])


def _ranges(schema: Schema) -> Iterator[str]:
    if (least := schema.get("exclusiveMinimum")) is not None:
        yield f"above {_number(least)}"
    for unit, low, high in RANGES:
        least, most = schema.get(low), schema.get(high)
        units = f"{unit}s" if unit and (most or least) != 1 else unit
        if least is not None and most is not None:
            yield f"{_number(least)} to {_number(most)}{units}"
        elif least is not None:
            yield f"at least {_number(least)}{units}"
        elif most is not None:
            yield f"at most {_number(most)}{units}"
    if (most := schema.get("exclusiveMaximum")) is not None:
        yield f"below {_number(most)}"


def _number(value: float) -> str:
    power = log2(abs(value)) if value else 0
    if round(power) in POWERS and power == round(power):
        return f"{'-' if value < 0 else ''}2^{round(power)}"
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _json_of(content: Schema) -> Schema:
    found: Schema = content["content"]["application/json"]["schema"]
    return found


def _is_strict(schema: Schema) -> bool:
    return schema.get("additionalProperties") is False


def _named(schema: Schema) -> str:
    return str(schema["$ref"]).rsplit("/", 1)[-1]


def _title(name: str) -> str:
    """Return a schema's name; two of one name are told apart by their module."""
    *modules, kind = name.split("__")
    return f"{kind} of {modules[-1]}" if modules else kind


def _prose(text: str) -> str:
    """Return text whose lines are those of a page: at most 100 characters."""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return "\n\n".join(textwrap.fill(_escaped(part), 100) for part in paragraphs if part)


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", r"\|")


def _escaped(text: str) -> str:
    """Return text in which what looks like a tag outside code is not one."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else part.replace("<", "&lt;").replace(">", "&gt;")
        for part in parts
    )


def commands() -> dict[str, Any]:
    """Return the commands by name."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return group.commands


def option_tables() -> dict[str, str]:
    """Return each table by what it is of: `juice generate`, `loading` or `engine`.

    Options that several commands share (how a model is loaded, which engine runs it) have a table.
    """
    doctor = commands()["doctor"].params
    found = {
        "loading": _table(p for p in doctor if p.name in LOADING),
        "engine": _table(p for p in doctor if p.name in ENGINE),
    }
    for name, command in commands().items():
        is_loading = any(p.name == "device" for p in command.params)
        shared = LOADING | ENGINE if is_loading else set()
        rest = [p for p in command.params if p.name not in shared]
        found[f"juice {name}"] = _table(rest)
    return found


def _table(parameters: Iterable[Any]) -> str:
    rows = [f"| {_option_names(p)} | {_option_default(p)} | {_what(p)} |" for p in parameters]
    return "\n".join(["| option | default | what |", "|---|---|---|", *rows])


def _option_names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _option_default(parameter: Any) -> str:
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
            text = f"{text} One of {', '.join(f'`{choice}`' for choice in choices)}."
    return text.replace("|", r"\|")
