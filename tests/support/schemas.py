"""Random JSON schemas whose answers are short, so that any model comes to an end."""

from __future__ import annotations

from random import Random
from typing import Any

from jsonschema import Draft202012Validator

NAMES = ("a", "name", "the capital", "ünïcode", "x_1", 'quo"te')


WHOLE = 2


def judge(schema: dict[str, Any]) -> Draft202012Validator:
    """Return what validates against a schema, formats too."""
    return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)


def chained(leaf: dict[str, Any], n: int = 30) -> dict[str, Any]:
    """Return a schema of n definitions each of which has the next one twice, and a leaf last."""
    links = {
        str(i): {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/{i + 1}"} for name in "ab"},
            "required": ["a", "b"],
        }
        for i in range(n)
    }
    return {"$ref": "#/$defs/0", "$defs": {**links, str(n): leaf}}


def random_schema(rng: Random, depth: int = WHOLE) -> dict[str, Any]:
    """Return a schema of bounded depth; every string, list and number in it is bounded."""
    kinds = [_enum, _integer, _string, _boolean, _constant, _pattern, _nullable, _format]
    if depth:
        kinds += [_object, _object, _array, _any_of, _one_of, _free_names]
    if depth == WHOLE:
        kinds += [_references, _references]
    return rng.choice(kinds)(rng, depth)


def _object(rng: Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 2))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def _array(rng: Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 1)
    items = random_schema(rng, depth - 1)
    return {
        "type": "array",
        "items": items,
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _any_of(rng: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _one_of(rng: Random, depth: int) -> dict[str, Any]:
    """Return kinds that exclude each other; llguidance refuses others."""
    kinds: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "null"},
        _integer(rng, depth),
        {"type": "string", "maxLength": rng.randint(1, 4)},
    ]
    return {"oneOf": rng.sample(kinds, rng.randint(2, 3))}


def _free_names(rng: Random, depth: int) -> dict[str, Any]:
    # A name that is not listed may come twice, so no more than one of them is asked for.
    return {
        "type": "object",
        "properties": {"a": random_schema(rng, depth - 1)},
        "required": ["a"],
        "patternProperties": {"^[b-d]{1,2}$": random_schema(rng, 0)},
        "additionalProperties": False,
        "minProperties": rng.randint(0, 2),
        "maxProperties": 2,
    }


def _references(rng: Random, depth: int) -> dict[str, Any]:
    part = {"$ref": "#/$defs/part"}
    return {
        **_object(rng, depth),
        "properties": {"one": part, "list": {"type": "array", "items": part, "maxItems": 2}},
        "required": rng.sample(["one", "list"], rng.randint(0, 2)),
        "$defs": {"part": random_schema(rng, depth - 2)},
    }


def _format(rng: Random, depth: int) -> dict[str, Any]:
    # Not `date`: llguidance lets every year have a 29 February.
    long = ["uuid"] if depth == WHOLE else []
    return {"type": "string", "format": rng.choice(["ipv4", *long])}


def _enum(rng: Random, _depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["yes", "no", 1, 2.5, None, True, "ß"], rng.randint(1, 4))}


def _constant(rng: Random, _depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["x", 0, False, None, {"a": 1}, [1, "b"]])}


def _integer(rng: Random, _depth: int) -> dict[str, Any]:
    least = rng.randint(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 1000)}


def _string(rng: Random, _depth: int) -> dict[str, Any]:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}


def _pattern(rng: Random, _depth: int) -> dict[str, Any]:
    return {
        "type": "string",
        "pattern": rng.choice(["^[a-c]{1,4}$", "^(on|off)$", "^\\d{3}-\\d{2}$"]),
    }


def _boolean(_rng: Random, _depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _nullable(rng: Random, _depth: int) -> dict[str, Any]:
    return {"type": ["null", "boolean"]} if rng.random() < 0.5 else {"type": "null"}
