"""GET /healthz: the process lives. GET /readyz: the model is loaded and can serve."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

router = APIRouter()


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Say that the process is alive."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """Say whether requests can be answered."""
    ready = request.app.state.service.is_ready
    return JSONResponse({"status": "ready" if ready else "loading"}, 200 if ready else 503)
