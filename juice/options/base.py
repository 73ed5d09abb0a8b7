"""What all options have in common: unknown names and values out of range are refused."""

from __future__ import annotations

from reprlib import repr as shortened
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from juice.errors import RequestError


class Options(BaseModel):
    """Values with ranges; unknown names are refused. Python code makes them with `of`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Return the options with these values.

        Raises RequestError, which names the first wrong one.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            path, problem = first_problem(error)
            name = path.partition(".")[0]
            raise RequestError(
                f"{path} is {shortened(error.errors()[0]['input'])}: {problem}", param=name
            ) from error


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Return the first wrong field, as a dotted path, and what is wrong with it."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    return field, first["msg"].removeprefix("Value error, ")
