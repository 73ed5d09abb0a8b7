"""GET /healthz: the process is of use. GET /readyz: the engine can serve. GET /metrics.

/health, /ping and /version are what clients and balancers made for vLLM ask for.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

import juice
from juice_server.schemas.loaded import Status, Version
from juice_server.service import LOST, ServiceOf
from juice_server.trace import trace_of

# Those that need no key, and those that do.
router, keyed = APIRouter(), APIRouter()
STATES: dict[int | str, dict[str, Any]] = {
    200: {"model": Status},
    503: {"model": Status, "description": "Loading, shutting down, or of no use any more."},
}


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", responses=STATES)
@router.get("/health", responses=STATES)
@router.get("/ping", responses=STATES)
@router.post("/ping", include_in_schema=False)
async def healthz(request: Request, service: ServiceOf) -> JSONResponse:
    """Report whether the process is of use: it loads a model, or its engine runs."""
    state = service.state
    is_lost = state in LOST
    trace_of(request.scope).is_dull = not is_lost
    return JSONResponse({"status": state if is_lost else "ok"}, 503 if is_lost else 200)


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", responses=STATES)
async def readyz(request: Request, service: ServiceOf) -> JSONResponse:
    """Report whether requests can be answered."""
    state = service.state
    trace_of(request.scope).is_dull = state in ("loading", "ready")
    return JSONResponse({"status": state}, 200 if state == "ready" else 503)


@keyed.get("/version")
async def version() -> Version:
    """Return the version of the server."""
    return Version(version=juice.__version__)


@keyed.head("/metrics", include_in_schema=False)
@keyed.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request, service: ServiceOf) -> Response:
    """Return the metrics, in Prometheus' text format."""
    trace_of(request.scope).is_dull = True
    return Response(service.metrics.render(), media_type=service.metrics.content_type)
