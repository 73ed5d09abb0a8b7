"""The OpenAPI document: what FastAPI makes, with each field's description where readers look."""

from __future__ import annotations

from typing import Any

import docstring_parser
from fastapi import FastAPI


def describe_fields(app: FastAPI) -> None:
    """Move the arguments that a class lists in its docstring to its fields.

    Schemas of the library's dataclasses have them there; those of the server have them at the
    fields already.
    """
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            for schema in make()["components"]["schemas"].values():
                _describe(schema)
        return make()

    app.openapi = openapi  # type: ignore[method-assign]


def _describe(schema: dict[str, Any]) -> None:
    text = docstring_parser.parse(schema.get("description", ""))
    for argument in text.params:
        if argument.arg_name in schema.get("properties", {}):
            own = schema["properties"][argument.arg_name]
            own.setdefault("description", " ".join((argument.description or "").split()))
    if text.params:
        schema["description"] = text.short_description or ""
