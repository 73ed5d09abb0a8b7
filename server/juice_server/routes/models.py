"""GET /v1/models, GET /v1/head_sets and GET /info: what is loaded, its limits, its head sets."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path

import juice
from juice import HeadSet
from juice.engine import Capability, Steer
from juice.errors import RequestError
from juice.head_set.scores import MEANINGS
from juice.methods import CONTRASTS, STEER_METHODS, STEER_TARGETS
from juice_server.errors import UnknownModelError
from juice_server.routes.strict import StrictRoute
from juice_server.service import Service, ServiceOf

router = APIRouter(route_class=StrictRoute)


@router.get("/v1/models")
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


@router.get("/v1/models/{name:path}")
async def model(
    name: Annotated[str, Path(description="One of those that /v1/models lists.")],
    service: ServiceOf,
) -> dict[str, Any]:
    """Show one of the names."""
    if name not in [entry["id"] for entry in (await models(service))["data"]]:
        raise UnknownModelError(f"the model {name!r} is not served; see /v1/models", param="model")
    return _model(name)


@router.get("/v1/head_sets")
async def head_sets(service: ServiceOf) -> dict[str, Any]:
    """List the head sets that fit the model, and the others with the reason."""
    unfit = service.model.head_sets.unfit
    return {
        "object": "list",
        "data": _head_sets(service),
        "unfit": [{"path": path, "reason": reason} for path, reason in unfit.items()],
    }


@router.get("/v1/head_sets/{name}")
async def head_set(
    name: Annotated[str, Path(description="One of those that /v1/head_sets lists.")],
    service: ServiceOf,
) -> dict[str, Any]:
    """Show a head set: its heads, and the scores by which they were chosen."""
    found = service.model.head_sets.get(name)
    heads, scores = found.heads, found.scores
    return {
        **_head_set(service, found),
        "heads": {
            "plus": [[head.layer, head.index] for head in heads.plus],
            "minus": [[head.layer, head.index] for head in heads.minus],
        },
        "scores": None
        if scores is None
        else {
            "kind": scores.kind,
            "meaning": MEANINGS[scores.kind],
            "conflict_types": scores.conflict_types,
            "plus": scores.plus.tolist(),
            "minus": scores.minus.tolist(),
        },
    }


@router.get("/info")
async def info(service: ServiceOf) -> dict[str, Any]:
    """Return what is loaded, its limits and how it can be steered."""
    engine, limits, settings = service.model.engine, service.model.engine.limits, service.settings
    own, chat = engine.description, service.translator.chat_model.prompts
    return {
        "version": juice.__version__,
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
            "head_sets": _head_sets(service),
        },
    }


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "juice"}


def _head_sets(service: Service) -> list[dict[str, Any]]:
    by_name = service.model.head_sets.by_name
    return [_head_set(service, head_set) for _, head_set in sorted(by_name.items())]


def _head_set(service: Service, head_set: HeadSet) -> dict[str, Any]:
    """Describe a head set; `window` is the first and the last layer with a companion."""
    described: dict[str, Any] = {
        "name": head_set.name,
        "target": head_set.target,
        "n_heads": len({*head_set.heads.plus, *head_set.heads.minus}),
        "beta": head_set.beta.model_dump() if head_set.beta else None,
        "gates": head_set.gates.model_dump() if head_set.gates else None,
        "chat_template_sha256": head_set.chat_template_sha256,
    }
    try:
        steering = service.model.resolve(Steer(target=head_set.target, head_set=head_set))
    except RequestError:  # without betas: its window depends on those of the request
        return {**described, "window": None, "extra_rows": None}
    window = service.model.engine.companion_layers(steering)
    n_layers = service.model.description.n_layers
    return {
        **described,
        "window": [window[0], window[-1]] if window else None,
        "extra_rows": round(len(window) / n_layers, 3),
    }
