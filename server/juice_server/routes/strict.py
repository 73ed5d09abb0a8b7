"""Bodies in which no field is given twice: programs differ in which of the two they take."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from juice.strict_json import without_twins


class StrictRequest(Request):
    """A request whose JSON has every field once."""

    async def json(self) -> Any:
        """Return the body; raises HTTPException for a field that is given twice."""
        body = await self.body()
        try:
            return json.loads(body, object_pairs_hook=without_twins)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise
        except ValueError as error:
            raise HTTPException(400, f"in the body {error}; give it once") from error


class StrictRoute(APIRoute):
    """A route that takes such requests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, which sees a StrictRequest."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly
