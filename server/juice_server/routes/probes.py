"""GET /healthz: the process is of use. GET /readyz: the engine can serve. GET /metrics.

/health, /ping and /version are what clients and balancers made for vLLM ask for.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

import juice
from juice_server.service import LOST, ServiceOf
from juice_server.trace import trace_of

router = APIRouter()


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
@router.get("/health")
@router.get("/ping")
@router.post("/ping", include_in_schema=False)
async def healthz(request: Request, service: ServiceOf) -> JSONResponse:
    """Report whether the process is of use: it loads a model, or its engine runs."""
    state = service.state
    is_lost = state in LOST
    trace_of(request.scope).is_dull = not is_lost
    return JSONResponse({"status": state if is_lost else "ok"}, 503 if is_lost else 200)


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
async def readyz(request: Request, service: ServiceOf) -> JSONResponse:
    """Report whether requests can be answered."""
    state = service.state
    trace_of(request.scope).is_dull = state in ("loading", "ready")
    return JSONResponse({"status": state}, 200 if state == "ready" else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of the server."""
    return {"version": juice.__version__}


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics")
async def metrics(request: Request, service: ServiceOf) -> Response:
    """Return the metrics, in Prometheus' text format."""
    trace_of(request.scope).is_dull = True
    return Response(service.metrics.render(), media_type=service.metrics.content_type)
