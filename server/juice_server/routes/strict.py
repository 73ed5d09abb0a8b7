"""Bodies in which no field is given twice: programs differ in which of the two they take."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from juice.strict_json import without_twins


class StrictRequest(Request):
    """A request whose JSON has every field once, and no number that cannot be read."""

    async def json(self) -> Any:
        """Return the body; raises HTTPException for what no field can be."""
        body = await self.body()
        try:
            return json.loads(body, object_pairs_hook=without_twins, parse_int=_whole)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise
        except ValueError as error:
            raise HTTPException(400, f"in the body {error}") from error


def _whole(digits: str) -> int:
    """Return a whole number; raises ValueError for one with more digits than Python reads."""
    try:
        return int(digits)
    except ValueError:
        raise ValueError(
            f"is a number of {len(digits)} digits; no field takes one so large"
        ) from None


class StrictRoute(APIRoute):
    """A route that takes such requests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, which sees a StrictRequest."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly
