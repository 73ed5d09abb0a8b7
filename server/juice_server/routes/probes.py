"""GET /healthz: the process is of use. GET /readyz: the engine can serve. GET /metrics.

/health, /ping and /version are what clients and balancers made for vLLM ask for.
"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

import juice
from juice_server.service import LOST, ServiceOf

router = APIRouter()


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
@router.get("/health")
@router.get("/ping")
@router.post("/ping", include_in_schema=False)
async def healthz(service: ServiceOf) -> JSONResponse:
    """Report whether the process is of use: it loads a model, or its engine runs."""
    state = service.state
    is_lost = state in LOST
    return JSONResponse({"status": state if is_lost else "ok"}, 503 if is_lost else 200)


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
async def readyz(service: ServiceOf) -> JSONResponse:
    """Report whether requests can be answered."""
    return JSONResponse({"status": service.state}, 200 if service.state == "ready" else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of the server."""
    return {"version": juice.__version__}


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics")
async def metrics(service: ServiceOf) -> Response:
    """Return the metrics, in Prometheus' text format."""
    return Response(service.metrics.render(), media_type=service.metrics.content_type)
