"""The fields that give an answer its form: OpenAI's `response_format`, and those of vLLM."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from juice.engine import Structure
from juice_server.schemas.documented import Documented

MAX_CHOICES_OF_TEXT = 10_000


def _some_schema(schema: dict[str, Any] | bool | str) -> dict[str, Any] | bool | str:
    if schema is False:
        raise ValueError("nothing is valid under this schema; give one, or true for any JSON")
    return {} if schema is True else schema


# A schema as an object, or as the text of one; true is that of any JSON.
Schema = Annotated[dict[str, Any] | bool | str, AfterValidator(_some_schema)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES_OF_TEXT, fail_fast=True)]


class _Part(Documented):
    model_config = ConfigDict(extra="forbid")


class NamedSchema(_Part):
    """A schema and what OpenAI has beside it; answers follow it whether `strict` or not."""

    name: str | None = None
    """Its name, for nobody but the reader."""
    description: str | None = None
    """What it is for."""
    schema_: Schema = Field(default={"type": "object"}, alias="schema")
    """The JSON schema, as an object or as text."""
    strict: bool | None = None
    """Accepted; answers always follow the schema."""


class ResponseFormat(_Part):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    """Any text, any JSON object, or JSON that is valid under a schema."""
    json_schema: NamedSchema | None = None
    """The schema, for type `json_schema`."""

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type json_schema needs json_schema, and no other type has one")
        return self


class StructuredOutputs(_Part):
    """vLLM's `structured_outputs`: one of these."""

    json_: Schema | None = Field(default=None, alias="json")
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    """A regular expression, that of Rust, of the whole answer."""
    choice: Texts | None = None
    """Texts of which the answer is one."""
    grammar: str | None = None
    """A grammar in Lark's or GBNF's notation."""
    json_object: bool | None = None
    """Any JSON object."""


def _parsed(value: Any) -> Any:
    """Read the text of an object, as some clients send it."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


class StructureFields(Documented):
    """Every field that can give an answer its form; at most one of them may."""

    response_format: ResponseFormat | None = None
    """The form of the answer, as OpenAI has it."""
    structured_outputs: Annotated[StructuredOutputs | None, BeforeValidator(_parsed)] = None
    """The form of the answer, as vLLM has it."""
    guided_json: Schema | None = None
    """The same as `structured_outputs.json`."""
    guided_regex: str | None = None
    """The same as `structured_outputs.regex`."""
    guided_choice: Texts | None = None
    """The same as `structured_outputs.choice`."""
    guided_grammar: str | None = None
    """The same as `structured_outputs.grammar`."""

    @model_validator(mode="after")
    def _one_structure(self) -> StructureFields:
        given = self._given()
        if len(given) > 1:
            raise ValueError(f"{' and '.join(sorted(given))} each give the answer a form; keep one")
        return self

    @property
    def structure(self) -> Structure | None:
        """The form of the answer; None: any."""
        return next(iter(self._given().values()), None)

    @property
    def structure_field(self) -> str | None:
        """The field that gives it."""
        return next(iter(self._given()), None)

    def _given(self) -> dict[str, Structure]:
        """Return the forms that fields give, by the name of the field."""
        own = self.structured_outputs or StructuredOutputs()
        format_ = self.response_format or ResponseFormat(type="text")
        asked: dict[str, Structure | None] = {
            "response_format": _of_format(format_),
            "structured_outputs.json": _json(own.json_),
            "structured_outputs.regex": _text("regex", own.regex),
            "structured_outputs.choice": _choice(own.choice),
            "structured_outputs.grammar": _text("grammar", own.grammar),
            "structured_outputs.json_object": Structure.json_object() if own.json_object else None,
            "guided_json": _json(self.guided_json),
            "guided_regex": _text("regex", self.guided_regex),
            "guided_choice": _choice(self.guided_choice),
            "guided_grammar": _text("grammar", self.guided_grammar),
        }
        return {name: structure for name, structure in asked.items() if structure is not None}


def _of_format(given: ResponseFormat) -> Structure | None:
    if given.json_schema is not None:
        return Structure.json_schema(given.json_schema.schema_)
    return Structure.json_object() if given.type == "json_object" else None


def _json(schema: Schema | None) -> Structure | None:
    return None if schema is None else Structure.json_schema(schema)


def _text(form: Literal["regex", "grammar"], text: str | None) -> Structure | None:
    return None if text is None else Structure(form, text)


def _choice(texts: list[str] | None) -> Structure | None:
    return None if texts is None else Structure.choice(texts)
