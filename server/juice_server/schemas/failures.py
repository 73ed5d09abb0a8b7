"""How failures look, to OpenAI's clients and to Anthropic's, and with which statuses they come."""

from __future__ import annotations

from typing import Any, Literal

from juice_server.schemas.documented import Documented


class ErrorContent(Documented):
    """What went wrong."""

    message: str
    """What was received, what was expected, and what to do."""
    type: str
    """The kind of error."""
    param: str | None
    """The field that is wrong; null where none is."""
    code: str | None
    """The error by its name; see the table of errors."""


class ErrorAnswer(Documented):
    """The answer to a request that fails."""

    error: ErrorContent
    """The error."""


class MessagesErrorContent(Documented):
    """What went wrong, as Anthropic's clients expect it."""

    type: str
    """The kind of error."""
    message: str
    """What was received, what was expected, and what to do."""


class MessagesErrorAnswer(Documented):
    """The answer to a request that fails, as Anthropic's clients expect it."""

    type: Literal["error"]
    """Says that this is an error."""
    error: MessagesErrorContent
    """The error."""


STATUSES = {
    400: "Something in the request is wrong; the error names the field.",
    401: "No key, or an unknown one.",
    403: "The key may not do this.",
    404: "No such model or head set.",
    413: "The body is too large.",
    422: "The head set was made for another model.",
    429: "Too much waits, or the key has used up its minute; see Retry-After.",
    500: "A fault of the server; its log has the details.",
    503: "Loading, shutting down, or out of time.",
}


# Beside those, where head sets are changed.
CHANGES = {
    409: "The change does not go with how the server runs, or with what is in its folder.",
    412: "The head set is not the one that the request expects.",
    507: "The disk is full; nothing was changed.",
}


def documented(model: type[Documented], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what FastAPI takes to document these statuses, or all STATUSES, with this answer."""
    texts = STATUSES | CHANGES
    return {
        status: {"model": model, "description": texts[status]} for status in statuses or STATUSES
    }
