"""POST /explain: which of the steered heads make a token of an answer likelier.

Each is left out in turn, in one batch: what changes is its effect, others' steering included.
"""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request

from juice import SteeredModel
from juice.engine import Completion, GenerationRequest, Steer
from juice.errors import RequestError
from juice_server.questions import asked
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.generate import TokenProbability
from juice_server.schemas.inside import MAX_HEADS, ExplainRequest, ExplainResponse, HeadEffect
from juice_server.schemas.shared import GenerationFields
from juice_server.service import ServiceOf
from juice_server.tokens import finite

router = APIRouter(route_class=StrictRoute)


@router.post("/explain")
async def explain(body: ExplainRequest, request: Request, service: ServiceOf) -> ExplainResponse:
    """Show what could have come in a token's place, and which heads decided."""
    steer, translator = body.steer(body.strength), service.translator
    steering = translator.model.resolve(steer)
    if len(steering.heads) > MAX_HEADS:
        raise RequestError(
            f"the head set steers {len(steering.heads)} heads; expected at most {MAX_HEADS}",
            param="head_set",
        )
    fields = GenerationFields(steer=steer, max_tokens=1)
    one = await asked(translator, request, body, fields)
    one = replace(one, prompt_ids=(*one.prompt_ids, *body.answer), top_logprobs=body.top)
    ways = _ways(translator.model, body, one)
    done = dict(zip(ways, await service.complete(request, list(ways.values())), strict=True))
    pair = body.tokens or _pair(done[body.target], done["none"])
    watching = [
        replace(own, watch=tuple(pair), top_logprobs=0)
        for own in (ways["none"], one, *(_without(one, *head) for head in steering.heads))
    ]
    none, full, *others = await service.complete(request, watching)
    effects = [
        HeadEffect(
            layer=layer,
            head=head,
            beta=float(steering.coefficients[layer][head]),
            effect=_difference(full) - _difference(own),
        )
        for (layer, head), own in zip(steering.heads, others, strict=True)
    ]
    texts = translator.texts
    return ExplainResponse(
        tokens=[
            TokenProbability(id=token, token=texts[token], logprob=finite(logprob))
            for token, logprob in zip(pair, full.watched, strict=True)
        ],
        unsteered=_difference(none),
        steered=_difference(full),
        heads=sorted(effects, key=lambda own: -abs(own.effect)),
        candidates={way: texts.alternatives(own.tokens[0]) for way, own in done.items()},
        steering=full.steering,
    )


def _ways(
    model: SteeredModel, body: ExplainRequest, one: GenerationRequest
) -> dict[str, GenerationRequest]:
    """Return the request under each way of steering."""
    ways = {"none": replace(one, steering=model.resolve(Steer(target="none")))}
    for target in body.targets({body.target, *model.head_sets.targets()}):
        other = body.steer(body.strength, target)
        ways[target] = one if target == body.target else replace(one, steering=model.resolve(other))
    return ways


def _without(one: GenerationRequest, layer: int, head: int) -> GenerationRequest:
    return replace(one, steering=one.steering.without(layer, head))


def _pair(steered: Completion, unsteered: Completion) -> list[int]:
    """Return the likeliest steered token, and the likeliest unsteered one or the runner-up."""
    first, second = (token for token, _ in steered.tokens[0].top[:2])
    other = unsteered.tokens[0].top[0][0]
    return [first, second if other == first else other]


def _difference(own: Completion) -> float:
    one, other = (finite(logprob) for logprob in own.watched)
    return one - other
