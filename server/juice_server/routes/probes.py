"""GET /healthz: the process is alive. GET /readyz: the engine can serve. GET /metrics."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from juice_server.service import ServiceOf

router = APIRouter()


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Report that the process is alive."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(service: ServiceOf) -> JSONResponse:
    """Report whether requests can be answered."""
    return JSONResponse({"status": service.state}, 200 if service.state == "ready" else 503)


@router.get("/metrics")
async def metrics(service: ServiceOf) -> Response:
    """Return the metrics, in Prometheus' text format."""
    return Response(service.metrics.render(), media_type=service.metrics.content_type)
