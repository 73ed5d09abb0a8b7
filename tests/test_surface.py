"""The public surface: names and signatures as `public_surface.txt` has them, each explained.

`pytest tests/test_surface.py --write-docs` accepts a change; without it the file must agree.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import juice

PAGE = Path(__file__).parent / "support" / "public_surface.txt"
PROPERTIES = (property, cached_property)
MANY = 3  # with more arguments than this, each has a line of its own
# Those whose options are explained where they are shared.
ELSEWHERE = {
    "SteeredModel.stream": "request",
    "SteeredModel.astream": "stream",
    "SteeredModel.agenerate": "generate",
    "SteeredModel": "juice.load",
}


def own_methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class of ours defines or inherits from us."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("juice")]
    names = {name for base in bases for name in vars(base) if not name.startswith("_")}
    for name in sorted(names):
        value = inspect.getattr_static(kind, name)
        if isinstance(value, PROPERTIES) or inspect.isroutine(getattr(kind, name)):
            yield name, value


def fields_of(kind: type) -> list[str]:
    """Return the fields of plain data, with their defaults."""
    if issubclass(kind, BaseModel):
        return [
            f"{name}: required"
            if f.is_required()
            else f"{name} = {f.get_default(call_default_factory=True)!r}"
            for name, f in kind.model_fields.items()
        ]
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        return [
            f"{field.name}: required"
            if field.default is field.default_factory is missing
            else f"{field.name} = {'made' if field.default is missing else repr(field.default)}"
            for field in dataclasses.fields(kind)
        ]
    return []


def plain(signature: inspect.Signature) -> str:
    """Return a signature without the addresses and places of its defaults."""
    return re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", str(signature))


def surface() -> str:
    lines: list[str] = []
    for name in juice.__all__:
        value = getattr(juice, name)
        if not inspect.isclass(value):
            lines.append(f"{name}{plain(inspect.signature(value))}")
            continue
        lines.append(f"class {name}")
        lines += [f"    {field}" for field in fields_of(value)]
        for method, each in own_methods(value):
            shown = (
                ""
                if isinstance(each, PROPERTIES)
                else plain(inspect.signature(getattr(value, method)))
            )
            lines.append(f"    {method}{shown}")
    return "\n".join(lines) + "\n"


def test_names_and_signatures_are_those_that_were_agreed_on(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-docs"):
        PAGE.write_text(surface())
    assert surface() == PAGE.read_text(), "a public signature changed: see --write-docs"


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in juice.__all__:
        value = getattr(juice, name)
        if not inspect.isclass(value):
            yield name, value
            continue
        yield name, value
        for method, each in own_methods(value):
            if not isinstance(each, PROPERTIES):
                yield f"{name}.{method}", getattr(value, method)


CALLABLES = dict(public_callables())


def arguments_of(name: str) -> list[str]:
    value = CALLABLES[name]
    if inspect.isclass(value):
        return [line.split(" ")[0].rstrip(":") for line in fields_of(value)]
    return [
        parameter
        for parameter in inspect.signature(value).parameters
        if parameter not in ("self", "cls")
    ]


def explained(docstring: str, argument: str) -> bool:
    """Return whether a docstring names an argument, in a sentence or on a line of its own."""
    word = argument.replace("_", "[ _]")
    return re.search(rf"(?m)^\s*{argument}: |`{argument}`|\b{word}\b", docstring) is not None


@pytest.mark.parametrize("name", CALLABLES)
def test_every_argument_is_explained(name: str) -> None:
    docstring = inspect.getdoc(CALLABLES[name]) or ""
    assert docstring, f"{name} has no docstring"
    value = CALLABLES[name]
    if inspect.isclass(value) and issubclass(value, BaseModel):
        fields = value.model_fields.items()
        missing = [n for n, f in fields if not f.description and not explained(docstring, n)]
        assert not missing or name in ("HeadSet", "ConflictExample"), (
            missing
        )  # formats of their own
        return
    if elsewhere := ELSEWHERE.get(name):
        assert elsewhere in docstring
        return
    arguments = arguments_of(name)
    unexplained = [argument for argument in arguments if not explained(docstring, argument)]
    if len(arguments) > MANY:
        assert unexplained == [], name


@pytest.mark.parametrize(
    "name", ["load", "identify", "tune", "evaluate", "read_examples", "select_heads"]
)
def test_every_public_function_names_its_errors(name: str) -> None:
    assert re.search(r"(?m)Raises:|[Rr]aises \w+Error", inspect.getdoc(CALLABLES[name]) or "")


def test_shapes_stand_where_tensors_are_taken() -> None:
    assert "[n_conflict_types, n_layers, n_heads]" in (inspect.getdoc(juice.select_heads) or "")
