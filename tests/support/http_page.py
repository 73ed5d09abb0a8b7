"""A page with every route, field, bound, default and status, from the OpenAPI document."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from math import log2
from typing import Any

from juice_server.app import create
from juice_server.settings import Settings

BEGINNING = """\
# HTTP, field by field

Every route with its fields, defaults, bounds and statuses, written by a test from the schema that
a server has at `/openapi.json`. [HTTP](http.md) explains what the fields do. A server may be set to
[tighter bounds](settings.md#limits-of-one-request).
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


def page() -> str:
    """Return the page of the running version."""
    document = create(Settings()).openapi()
    schemas = document["components"]["schemas"]
    routes = [
        (f"{method.upper()} {path}", own)
        for path, methods in document["paths"].items()
        for method, own in methods.items()
    ]
    parts = [BEGINNING, "## Routes\n"]
    parts += [_route(name, own, schemas) for name, own in routes]
    parts += ["## Objects\n", *_objects([own for _, own in routes], schemas)]
    parts.append(_statuses([own for _, own in routes]))
    return "\n".join(parts)


def _route(name: str, route: Schema, schemas: dict[str, Schema]) -> str:
    lines = [f"### {name}", "", _prose(route["description"]), ""]
    if parameters := route.get("parameters"):
        rows = {own["name"]: {**own["schema"], **own} for own in parameters}
        lines += [_fields({"properties": rows, "required": list(rows)}), ""]
    if body := route.get("requestBody"):
        schema = schemas[_named(_json_of(body))]
        lines += [_fields(schema), "", *([REFUSES, ""] if _is_strict(schema) else [])]
    success = next(own for status, own in route["responses"].items() if status.startswith("2"))
    for kind, answer in success.get("content", {}).items():
        if "$ref" in answer["schema"]:
            lines += [f"It answers {_type(answer['schema'])}.", ""]
        elif kind != "application/json":
            lines += [f"It answers `{kind}`.", ""]
    lines += [f"[Statuses](#statuses): {', '.join(route['responses'])}.", ""]
    return "\n".join(lines)


def _objects(routes: list[Schema], schemas: dict[str, Schema]) -> Iterator[str]:
    """Yield the objects that bodies and answers are made of, by their names."""
    bodies = {_named(_json_of(own["requestBody"])) for own in routes if "requestBody" in own}
    for name, schema in sorted(schemas.items(), key=lambda item: _title(item[0]).lower()):
        if name in bodies:
            continue
        text = schema.get("description", "") + (f" {REFUSES}" if _is_strict(schema) else "")
        yield f"### {_title(name)}\n\n{_prose(text)}\n\n{_fields(schema)}\n"


def _statuses(routes: list[Schema]) -> str:
    """Return the table of statuses; a status means the same on every route."""
    means: dict[str, set[str]] = {}
    for route in routes:
        for status, own in route["responses"].items():
            means.setdefault(status, set()).add(own["description"])
    means["200"] = {"The answer."}
    rows = [f"| {status} | {' '.join(sorted(own))} |" for status, own in sorted(means.items())]
    return "\n".join(["## Statuses", "", "| status | when |", "|---|---|", *rows, ""])


def _fields(schema: Schema) -> str:
    required = schema.get("required", ())
    rows = [
        f"| `{name}` | {_type(own)} | {_default(own, is_required=name in required)} "
        f"| {_bounds(own)} | {_cell(own.get('description', ''))} |"
        for name, own in schema.get("properties", {}).items()
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
        return " or ".join(f"`{json.dumps(own)}`" for own in schema["enum"])
    for union in ("anyOf", "oneOf"):
        if union in schema:
            kinds = dict.fromkeys(_type(own) for own in schema[union] if own.get("type") != "null")
            is_optional = any(own.get("type") == "null" for own in schema[union])
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
    return "`null`" if any(own.get("type") == "null" for own in schema.get("anyOf", ())) else ""


def _bounds(schema: Schema) -> str:
    """Return the bounds of a value, and those of its parts."""
    parts = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    found = dict.fromkeys(
        bound for own in parts if "prefixItems" not in own for bound in _ranges(own)
    )
    items = [own[key] for own in parts for key in ("items", "additionalProperties") if key in own]
    inner = dict.fromkeys(
        f"each {bound}" for own in items if isinstance(own, dict) if (bound := _bounds(own))
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
    paragraphs = [" ".join(own.split()) for own in text.split("\n\n")]
    return "\n\n".join(textwrap.fill(_escaped(own), 100) for own in paragraphs if own)


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", r"\|")


def _escaped(text: str) -> str:
    """Return text in which what looks like a tag outside code is not one."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        own if own.startswith("`") else own.replace("<", "&lt;").replace(">", "&gt;")
        for own in parts
    )
