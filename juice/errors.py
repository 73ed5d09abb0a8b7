"""Every error that JuICE raises on purpose; each gives what, got, expected and remedy in one line.

A subclass has the exit code of its base, and `except` takes the bases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class JuiceError(Exception):
    """The root; `exit_code` is what the command line exits with."""

    exit_code = 1


class NoConsistentHeadError(JuiceError):
    """No head raises (or lowers) the target's probability under every conflict type."""


class GenerationError(JuiceError):
    """A request failed while it ran; the others went on."""


class NonFiniteError(GenerationError):
    """The logits of a request were not finite."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not finite; lower the strength, or load the model with "
            "--dtype float32"
        )


class CancelledError(GenerationError):
    """The request was cancelled before it was done."""


class OverloadedError(JuiceError):
    """The queue of waiting requests is full."""


class EngineStoppedError(JuiceError):
    """The engine was closed or failed as a whole; nothing runs any more."""


class UsageError(JuiceError):
    """Something the caller gave cannot be used."""

    exit_code = 2


class ModelNotFoundError(UsageError):
    """The model is not a hub id, a folder or a bundled name that can be loaded."""


class UnsupportedModelError(UsageError):
    """The model's attention cannot be steered exactly."""


class ExampleError(UsageError):
    """An examples file is unreadable, or an example is malformed or unusable."""


class HeadSetError(UsageError):
    """A head set is malformed, damaged or of an unknown format; `param`: where requests name it."""

    param = "steer.head_set"


class HeadSetNotFoundError(HeadSetError):
    """There is no head set of that name for the loaded model, or the hub provides none."""


class HeadSetMismatchError(HeadSetError):
    """The head set was made for another model."""


class WindowError(HeadSetMismatchError):
    """The head set steers layers in which the running engine cannot."""


class RequestError(UsageError):
    """A generation request asks for something impossible; `param` names the field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt, or the prompt and its new tokens, exceed the model's context."""


class MissingCapabilityError(RequestError):
    """This engine cannot do what the request needs; another one can."""


class OutputError(UsageError):
    """A file or folder cannot be written, or exists and must not be overwritten."""


def first_line(error: BaseException) -> str:
    """Return the first line of what a library's error says, or its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def causes_of(error: BaseException) -> list[BaseException]:
    """Return an error and the errors that it was raised from."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    return causes


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Return the first wrong field, as a dotted path, and what is wrong with it."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    return field, first["msg"].removeprefix("Value error, ")
