"""GET /v1/models and GET /info: what is loaded, its limits, what steers it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path

import juice
from juice.engine import Capability
from juice.methods import CONTRASTS, STEER_METHODS, STEER_TARGETS
from juice_server.errors import UnknownModelError
from juice_server.routes.head_sets import described
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.loaded import Info, ModelEntry, ModelList
from juice_server.service import ServiceOf

router = APIRouter(route_class=StrictRoute)


@router.get("/v1/models", response_model=None, responses={200: {"model": ModelList}})
async def models(service: ServiceOf) -> dict[str, Any]:
    """List the model and its names that steer."""
    served: list[str] = list(service.model.head_sets.targets())
    if service.settings.default_steer != "none":
        served.insert(0, "none")
    names = [
        service.translator.model_name,
        *(f"{service.translator.model_name}:{target}" for target in served),
    ]
    return {"object": "list", "data": [_model(name) for name in names]}


@router.get("/v1/models/{name:path}", response_model=None, responses={200: {"model": ModelEntry}})
async def model(
    name: Annotated[str, Path(description="One of those that /v1/models lists.")],
    service: ServiceOf,
) -> dict[str, Any]:
    """Show one of the names."""
    if name not in [entry["id"] for entry in (await models(service))["data"]]:
        raise UnknownModelError(f"the model {name!r} is not served; see /v1/models", param="model")
    return _model(name)


@router.get("/info", response_model=None, responses={200: {"model": Info}})
async def info(service: ServiceOf) -> dict[str, Any]:
    """Return what is loaded, its limits and how it can be steered."""
    engine, limits, settings = service.model.engine, service.model.engine.limits, service.settings
    own, chat = engine.description, service.translator.chat_model.prompts
    return {
        "version": juice.__version__,
        "system_fingerprint": service.system_fingerprint,
        "engine": {"name": engine.name, **engine.details},
        "model": {
            "name": service.translator.model_name,
            "architecture": own.identity.architecture,
            "n_layers": own.identity.n_layers,
            "n_heads": own.identity.n_heads,
            "fingerprint": own.identity.fingerprint,
            "dtype": own.dtype,
            "quantization": own.quantization,
            "device": own.device,
            "tp": own.n_devices,
            "has_chat_template": chat.chat_template is not None,
            "chat_template_sha256": chat.sha256,
        },
        "limits": {
            "max_model_len": limits.max_model_len,
            "max_batch": settings.max_batch,
            "max_queue": settings.max_queue,
            "kv_memory_bytes": limits.kv_memory_bytes,
            "max_prefill_tokens": limits.max_prefill_tokens,
            "kv_bytes_per_token": engine.n_kv_bytes_per_token,
            "max_tokens": settings.max_tokens,
            "max_prompt_tokens": settings.max_prompt_tokens,
            "max_prompt_characters": settings.max_prompt_characters,
            "max_prompts": settings.max_prompts,
            "max_n": settings.max_n,
            "max_body_bytes": settings.max_body,
            "request_timeout_s": settings.request_timeout,
        },
        "steering": {
            "exact": own.exact,
            "default": settings.default_steer,
            "default_gate": settings.default_gate,
            "targets": list(STEER_TARGETS),
            "methods": [
                m
                for m in STEER_METHODS
                if m not in CONTRASTS or Capability.CONTRAST in engine.capabilities
            ],
            "head_sets": described(service),
        },
    }


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "juice"}
