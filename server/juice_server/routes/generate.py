"""POST /generate."""

from __future__ import annotations

from fastapi import APIRouter, Request

from juice_server.schemas import GenerateRequest, GenerateResponse
from juice_server.service import Service

router = APIRouter()


@router.post("/generate", response_model_exclude_none=True)
async def generate(body: GenerateRequest, request: Request) -> GenerateResponse:
    """Continue one or more prompts, steered as asked."""
    service: Service = request.app.state.service
    return await service.generate(body)
