"""Random JSON schemas whose answers are short, so that any model comes to an end."""

from __future__ import annotations

from random import Random
from typing import Any

NAMES = ("a", "name", "the capital", "ünïcode", "x_1", 'quo"te')


def random_schema(rng: Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema of bounded depth; every string, list and number in it is bounded."""
    kinds = [_enum, _integer, _string, _boolean, _constant, _pattern, _nullable]
    if depth:
        kinds += [_object, _object, _array, _any_of]
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
