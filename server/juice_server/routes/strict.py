"""Bodies in which no field is given twice: programs differ in which of the two they take."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute


class StrictRequest(Request):
    """A request whose JSON has every field once."""

    async def json(self) -> Any:
        """Return the body; raises HTTPException for a field that is given twice."""
        return json.loads(await self.body(), object_pairs_hook=_once)


class StrictRoute(APIRoute):
    """A route that takes such requests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, which sees a StrictRequest."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise HTTPException(400, f"the body gives {twice} twice; give it once")
    return found
