"""What is served and how it is: the model and its names, its head sets, limits, health and metrics.

/health, /ping and /version are what clients and balancers made for vLLM ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Path, Request, Response
from pydantic import ConfigDict

import juice
from juice.engine.contract import Capability
from juice.engine.steer import Steer
from juice.errors import RequestError
from juice.formula import (
    CONTRASTS,
    METHODS,
    STEER_METHODS,
    STEER_TARGETS,
    GateMode,
    Method,
    SteerMethod,
    SteerTarget,
    Target,
)
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Betas, Gate, Harm, HeadLists
from juice.head_set.scores import MEANINGS
from juice_server.errors import UnknownModelError
from juice_server.fields import Answer
from juice_server.http import StrictRoute
from juice_server.service import LOST, Service, ServiceOf
from juice_server.trace import trace_of

Part = TypeVar("Part", Betas, Gate)


class Status(Answer):
    """The state of the server."""

    status: str
    """`ok` or `ready`; else why not: `loading`, `draining`, `engine failed` or `engine stuck`."""


class Version(Answer):
    """The version of the server."""

    version: str
    """The version of JuICE."""


class ModelEntry(Answer):
    """A name that the model is served under."""

    id: str
    """The name; `NAME:context` and `NAME:parametric` steer."""
    object: Literal["model"] = "model"
    created: Literal[0] = 0
    owned_by: Literal["juice"] = "juice"


class ModelList(Answer):
    """The names that the model is served under."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]
    """The names."""


class ShownHeadSet(Answer):
    """A head set that fits the model."""

    name: str
    """What requests call it."""
    target: Target
    """What it steers toward."""
    sha256: str
    """The hash over the whole of it."""
    method: Method
    """The method that serves requests that name none."""
    n_heads: int
    """How many heads that method scales; one of both signs counts once."""
    beta: dict[Method, Betas | None] | None
    """The betas of each method; null for a set that serves only requests with their own."""
    gates: dict[Method, Gate | None] | None
    """The gates of each method; null where none was measured, or none was good enough."""
    harm: dict[Method, dict[str, Harm]]
    """What each method does to ordinary text, without a gate, by strength; empty where unknown."""
    chat_template_sha256: str | None
    """The hash of the chat template that it was found through; null for plain prompts."""
    window: tuple[int, int] | None
    """The first and the last layer with a companion; null where there is none."""
    extra_rows: float | None
    """The share of layers with a companion; null for a set without betas."""


class ShownScores(Answer):
    """The scores by which heads were chosen: by conflict type, layer and head."""

    kind: str
    """How they were found."""
    meaning: str
    """What a score says."""
    conflict_types: list[str]
    """The conflict types, in order."""
    plus: list[list[list[float]]]
    """The scores for + heads."""
    minus: list[list[list[float]]]
    """The scores for - heads."""


class WholeHeadSet(ShownHeadSet):
    """A head set with its heads."""

    heads: HeadLists
    """The heads of each sign, each its layer and its number there."""
    scores: ShownScores | None
    """The scores by which they were chosen; null where they are not kept."""


class UnfitHeadSet(Answer):
    """A head set of the folder that is not served."""

    path: str
    """Where it lies in the folder."""
    reason: str
    """Why it does not fit the model."""


class HeadSetList(Answer):
    """The head sets of the folder."""

    object: Literal["list"] = "list"
    data: list[ShownHeadSet]
    """The head sets that fit the model."""
    unfit: list[UnfitHeadSet]
    """The others, with the reason."""
    problem: str | None
    """Why what the folder holds now is not served; null where it is."""


class EngineInfo(Answer):
    """The engine; further fields are facts about it that differ from engine to engine."""

    model_config = ConfigDict(extra="allow")

    name: str
    """`own` or `vllm`."""


class ModelInfo(Answer):
    """The model that is loaded."""

    name: str
    """What clients call it."""
    architecture: str
    """Its class in transformers."""
    n_layers: int
    """How many layers it has."""
    n_heads: int
    """How many query heads each layer has."""
    fingerprint: str | None
    """The hash by which head sets know it; null where it cannot be read."""
    dtype: str
    """The type of its weights."""
    dtype_reason: str | None
    """Why it is that, where JuICE chose it by the CPU; else null."""
    quantization: str | None
    """How they are quantised; null where they are not."""
    device: str
    """Where it runs."""
    tp: int
    """How many devices share each layer."""
    has_chat_template: bool
    """Whether chats are served."""
    chat_template_sha256: str | None
    """The hash of the chat template; null without one."""


class LimitsInfo(Answer):
    """The bounds of requests; null where there is none of the server's own."""

    max_model_len: int | None
    """Tokens of prompt and answer."""
    max_batch: int
    """Generations of one client that run at the same time."""
    max_queue: int
    """Generations of one client that may wait."""
    kv_memory_bytes: int | None
    """Memory for keys and values."""
    max_prefill_tokens: int
    """Cost of a step, in tokens of a short prompt."""
    kv_bytes_per_token: int
    """What the keys and values of one token take."""
    max_tokens: int | None
    """New tokens of an answer."""
    max_prompt_tokens: int | None
    """Tokens of a prompt."""
    max_prompt_characters: int
    """Characters of a prompt."""
    max_prompts: int
    """Prompts of a request."""
    max_n: int
    """Choices of a prompt."""
    max_body_bytes: int
    """Size of a request's body."""
    request_timeout_s: float
    """Seconds for a request."""


class SteeringInfo(Answer):
    """How requests can be steered."""

    exact: bool
    """Whether steering is exact; false where the model's activations are quantised."""
    default: SteerTarget
    """How requests without `steer` are steered."""
    default_gate: GateMode
    """The gate of requests that name none."""
    targets: list[SteerTarget]
    """What a request may steer toward."""
    methods: list[SteerMethod]
    """The methods that the engine has."""
    head_sets: list[ShownHeadSet]
    """The head sets that fit the model."""


class Info(Answer):
    """What is loaded, its limits and how it can be steered."""

    version: str
    """The version of JuICE."""
    system_fingerprint: str
    """A name for all that decides a request's bits alone: model, dtype, engine, versions, flags."""
    engine: EngineInfo
    """The engine that runs the model."""
    model: ModelInfo
    """The loaded model, and what its weights are."""
    limits: LimitsInfo
    """The bounds of requests."""
    steering: SteeringInfo
    """How requests can be steered, and by which head sets."""


router = APIRouter(route_class=StrictRoute)


@router.get("/v1/head_sets")
async def head_sets(service: ServiceOf) -> HeadSetList:
    """List the head sets that fit the model, and the others with the reason.

    `problem` says why what the folder holds now is not served, and is null where it is.
    """
    unfit = service.model.head_sets.unfit
    return HeadSetList(
        data=_served(service),
        unfit=[UnfitHeadSet(path=path, reason=reason) for path, reason in unfit.items()],
        problem=service.head_sets.problem,
    )


@router.get("/v1/head_sets/{name}")
async def head_set(
    name: Annotated[str, Path(description="One of those that /v1/head_sets lists.")],
    service: ServiceOf,
) -> WholeHeadSet:
    """Show a head set: its heads, and the scores by which they were chosen."""
    found = service.model.head_sets.get(name)
    scores = found.scores
    return WholeHeadSet(
        **_facts(service, found),
        heads=found.heads,
        scores=None
        if scores is None
        else ShownScores(
            kind=scores.kind,
            meaning=MEANINGS[scores.kind],
            conflict_types=list(scores.conflict_types),
            plus=scores.plus.tolist(),
            minus=scores.minus.tolist(),
        ),
    )


def _served(service: Service) -> list[ShownHeadSet]:
    """Return the head sets that are served, by name."""
    by_name = service.model.head_sets.by_name
    return [ShownHeadSet(**_facts(service, by_name[name])) for name in sorted(by_name)]


def _facts(service: Service, head_set: HeadSet) -> dict[str, Any]:
    """Return the fields of `ShownHeadSet`."""
    window: tuple[int, int] | None = None
    extra_rows = None
    try:
        steering = service.model.resolve(Steer(target=head_set.target, head_set=head_set))
    except RequestError:
        pass  # without betas: its window depends on those of the request
    else:
        layers = service.model.engine.companion_layers(steering)
        window = (layers[0], layers[-1]) if layers else None
        extra_rows = round(len(layers) / service.model.description.n_layers, 3)
    return {
        "name": head_set.name,
        "target": head_set.target,
        "sha256": head_set.seal,
        "method": head_set.method,
        "n_heads": len(head_set.heads.all),
        "beta": _by_method(head_set.betas),
        "gates": _by_method(head_set.gate),
        "harm": {
            method: measured.harm
            for method in METHODS
            if (measured := head_set.validation(method)) is not None and measured.harm
        },
        "chat_template_sha256": head_set.chat_template_sha256,
        "window": window,
        "extra_rows": extra_rows,
    }


def _by_method(part_of: Callable[[Method], Part | None]) -> dict[Method, Part | None] | None:
    """Return a part of a head set for each method; None where no method has it."""
    parts = {method: part_of(method) for method in METHODS}
    return parts if any(parts.values()) else None


@router.get("/v1/models")
async def models(service: ServiceOf) -> ModelList:
    """List the model and its names that steer."""
    served: list[str] = list(service.model.head_sets.targets())
    if service.settings.default_steer != "none":
        served.insert(0, "none")
    name = service.translator.model_name
    names = [name, *(f"{name}:{target}" for target in served)]
    return ModelList(data=[ModelEntry(id=name) for name in names])


@router.get("/v1/models/{name:path}")
async def model(
    name: Annotated[str, Path(description="One of those that /v1/models lists.")],
    service: ServiceOf,
) -> ModelEntry:
    """Show one of the names."""
    for entry in (await models(service)).data:
        if entry.id == name:
            return entry
    raise UnknownModelError(f"the model {name!r} is not served; see /v1/models", param="model")


@router.get("/info")
async def info(service: ServiceOf) -> Info:
    """Return what is loaded, its limits and how it can be steered."""
    engine, limits, settings = service.model.engine, service.model.engine.limits, service.settings
    description, prompts = engine.description, service.translator.chat_model.prompts
    identity = description.identity
    has_contrasts = Capability.CONTRAST in engine.capabilities
    return Info(
        version=juice.__version__,
        system_fingerprint=service.system_fingerprint,
        engine=EngineInfo(name=engine.name, **engine.details),
        model=ModelInfo(
            name=service.translator.model_name,
            **identity.model_dump(include={"architecture", "n_layers", "n_heads", "fingerprint"}),
            dtype=description.dtype,
            dtype_reason=description.dtype_reason,
            quantization=description.quantization,
            device=description.device,
            tp=description.n_devices,
            has_chat_template=prompts.chat_template is not None,
            chat_template_sha256=prompts.sha256,
        ),
        limits=LimitsInfo(
            max_model_len=limits.max_model_len,
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            kv_memory_bytes=limits.kv_memory_bytes,
            max_prefill_tokens=limits.max_prefill_tokens or 0,
            kv_bytes_per_token=engine.n_kv_bytes_per_token,
            max_tokens=settings.max_tokens,
            max_prompt_tokens=settings.max_prompt_tokens,
            max_prompt_characters=settings.max_prompt_characters,
            max_prompts=settings.max_prompts,
            max_n=settings.max_n,
            max_body_bytes=settings.max_body,
            request_timeout_s=settings.request_timeout,
        ),
        steering=SteeringInfo(
            exact=description.exact,
            default=settings.default_steer,
            default_gate=settings.default_gate,
            targets=list(STEER_TARGETS),
            methods=[name for name in STEER_METHODS if has_contrasts or name not in CONTRASTS],
            head_sets=_served(service),
        ),
    )


# Routes that need no key, and routes that need one.
open_router, keyed_router = APIRouter(), APIRouter()
STATES: dict[int | str, dict[str, Any]] = {
    200: {"model": Status},
    503: {"model": Status, "description": "Loading, shutting down, or of no use any more."},
}


@open_router.head("/healthz", include_in_schema=False)
@open_router.get("/healthz", responses=STATES)
@open_router.get("/health", responses=STATES)
@open_router.get("/ping", responses=STATES)
@open_router.post("/ping", include_in_schema=False)
async def healthz(request: Request, response: Response, service: ServiceOf) -> Status:
    """Report whether the process is of use: it loads a model, or its engine runs."""
    state = service.state
    is_lost = state in LOST
    trace_of(request.scope).is_dull = not is_lost
    response.status_code = 503 if is_lost else 200
    return Status(status=state if is_lost else "ok")


@open_router.head("/readyz", include_in_schema=False)
@open_router.get("/readyz", responses=STATES)
async def readyz(request: Request, response: Response, service: ServiceOf) -> Status:
    """Report whether requests can be answered."""
    state = service.state
    trace_of(request.scope).is_dull = state in ("loading", "ready")
    response.status_code = 200 if state == "ready" else 503
    return Status(status=state)


@keyed_router.get("/version")
async def version() -> Version:
    """Return the version of the server."""
    return Version(version=juice.__version__)


@keyed_router.head("/metrics", include_in_schema=False)
@keyed_router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request, service: ServiceOf) -> Response:
    """Return the metrics, in Prometheus' text format."""
    trace_of(request.scope).is_dull = True
    return Response(service.metrics.render(), media_type=service.metrics.content_type)
