"""Head sets: GET lists and shows them, PUT and DELETE change them where the settings allow it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from juice import HeadSet
from juice.engine import Steer
from juice.errors import HeadSetError, RequestError
from juice.head_set.schema import NAME_PATTERN
from juice.head_set.scores import MEANINGS
from juice_server.conditions import Conditions, tag_of
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.head_sets import HeadSetFiles
from juice_server.schemas.loaded import HeadSetList, ShownHeadSet, WholeHeadSet
from juice_server.service import Service, ServiceOf

router = APIRouter(route_class=StrictRoute)
changes = APIRouter(route_class=StrictRoute)
Name = Annotated[str, Path(pattern=NAME_PATTERN, description="The name of the head set.")]


@router.get("/v1/head_sets", response_model=None, responses={200: {"model": HeadSetList}})
async def head_sets(service: ServiceOf) -> dict[str, Any]:
    """List the head sets that fit the model, and the others with the reason.

    `problem` says why what the folder holds now is not served, and is null where it is.
    """
    unfit = service.model.head_sets.unfit
    return {
        "object": "list",
        "data": described(service),
        "unfit": [{"path": path, "reason": reason} for path, reason in unfit.items()],
        "problem": service.head_sets.problem,
    }


@router.get("/v1/head_sets/{name}", response_model=None, responses={200: {"model": WholeHeadSet}})
async def head_set(
    name: Annotated[str, Path(description="One of those that /v1/head_sets lists.")],
    service: ServiceOf,
    response: Response,
) -> dict[str, Any]:
    """Show a head set: its heads, and the scores by which they were chosen."""
    found = service.model.head_sets.get(name)
    response.headers["etag"] = tag_of(found.seal)
    heads, scores = found.heads, found.scores
    return {
        **_described(service, found),
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


@changes.put(
    "/v1/head_sets/{name}",
    response_model=None,
    responses={
        200: {"description": "The head set was replaced.", "model": ShownHeadSet},
        201: {"description": "The head set is new.", "model": ShownHeadSet},
    },
)
async def put_head_set(
    name: Name, body: HeadSetFiles, request: Request, response: Response, service: ServiceOf
) -> dict[str, Any]:
    """Add a head set or replace the one of its name, here and wherever else its folder is served.

    `If-Match: ETAG` replaces that very set alone, and `If-None-Match: *` only adds. What runs keeps
    the set that it began with.
    """
    conditions, model = Conditions.of(request.headers), service.model

    def work() -> tuple[HeadSet, bool]:
        try:
            head_set = body.head_set_named(name)
            model.head_set_of(Steer(target=head_set.target, head_set=head_set))
            model.head_sets.check_fits(head_set)
        except HeadSetError as error:
            error.param = "head_set"
            raise
        return head_set, service.head_sets.put(head_set, conditions)

    head_set, is_new = await service.translator.off_loop(request, work)
    await service.head_sets.refresh()
    response.status_code = 201 if is_new else 200
    response.headers["etag"] = tag_of(head_set.seal)
    return _described(service, head_set)


@changes.delete("/v1/head_sets/{name}", status_code=204)
async def delete_head_set(name: Name, request: Request, service: ServiceOf) -> None:
    """Remove a head set, here and wherever else its folder is served.

    `If-Match: ETAG` removes that very set alone.
    """
    conditions = Conditions.of(request.headers)
    await service.translator.off_loop(request, lambda: service.head_sets.delete(name, conditions))
    await service.head_sets.refresh()


def described(service: Service) -> list[dict[str, Any]]:
    """Describe the head sets that are served."""
    by_name = service.model.head_sets.by_name
    return [_described(service, head_set) for _, head_set in sorted(by_name.items())]


def _described(service: Service, head_set: HeadSet) -> dict[str, Any]:
    """Describe a head set; `window` is the first and the last layer with a companion."""
    described: dict[str, Any] = {
        "name": head_set.name,
        "target": head_set.target,
        "sha256": head_set.seal,
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
