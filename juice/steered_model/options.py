"""The options of one prompt or of many: lists taken apart, `steer` and what stands beside it put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from juice.engine import Steer, SteerTarget
from juice.errors import RequestError
from juice.head_set import HeadSet

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
# One value for all prompts, or a list of one value a prompt.
OneOrEach: TypeAlias = T | list[T]
# A list would be one value a prompt, so several stop strings of one prompt are a tuple.
Stop: TypeAlias = str | tuple[str, ...] | None


def options_of(
    template: Callable[Concatenate[Any, T, P], object],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, T, P], R]]:
    """Let a method take the prompt and the options of another one, for type checkers and for `inspect`."""

    def decorate(method: Callable[..., R]) -> Callable[Concatenate[Any, T, P], R]:
        @wraps(method)
        def call(*args: Any, **options: Any) -> R:
            return method(*args, **options)

        returned = signature(method).return_annotation
        call.__signature__ = signature(template).replace(return_annotation=returned)  # type: ignore[attr-defined]
        return call

    return decorate


def options_for(options: Mapping[str, Any], index: int, n_prompts: int) -> dict[str, Any]:
    """Return a prompt's own options: of a list its own value, everything else as it is."""
    own = {}
    for name, value in options.items():
        if isinstance(value, list) and len(value) != n_prompts:
            raise RequestError(
                f"{name} lists {len(value)} values for {n_prompts} prompts; a list is one value a"
                " prompt"
                + (", several stop strings of one prompt are a tuple" if name == "stop" else ""),
                param=name,
            )
        own[name] = value[index] if isinstance(value, list) else value
    return own


def steer_of(
    steer: SteerTarget | Steer, strength: float | None = None, head_set: str | HeadSet | None = None
) -> Steer:
    """Return what is asked for as one value.

    Raises RequestError where parts of it do not go together.
    """
    given: dict[str, Any] = {"strength": strength, "head_set": head_set}
    given = {name: value for name, value in given.items() if value is not None}
    return replace(steer, **given) if isinstance(steer, Steer) else Steer(target=steer, **given)


def join_context(context: str, prompt: str) -> str:
    """Put a context before a prompt, with a space between where neither brings white space."""
    glue = "" if not context or context[-1].isspace() or prompt[:1].isspace() else " "
    return f"{context}{glue}{prompt}"
