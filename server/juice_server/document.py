"""The OpenAPI document: what FastAPI makes, with fields described and every answer's headers."""

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
            document = make()
            for schema in document["components"]["schemas"].values():
                _describe(schema)
            for methods in document["paths"].values():
                for operation in methods.values():
                    _add_headers(operation["responses"])
        return make()

    app.openapi = openapi  # type: ignore[method-assign]


def _add_headers(responses: dict[str, Any]) -> None:
    for status, response in responses.items():
        headers = response.setdefault("headers", {})
        headers["x-request-id"] = _header("The id of the request: the client's own, or a new one.")
        if status in ("429", "503"):
            headers["retry-after"] = _header("After how many seconds there may be room.")


def _header(text: str) -> dict[str, Any]:
    return {"description": text, "schema": {"type": "string"}}


def _describe(schema: dict[str, Any]) -> None:
    text = docstring_parser.parse(schema.get("description", ""))
    for argument in text.params:
        if argument.arg_name in schema.get("properties", {}):
            own = schema["properties"][argument.arg_name]
            own.setdefault("description", " ".join((argument.description or "").split()))
    if text.params:
        schema["description"] = text.short_description or ""
