"""POST /compare: one prompt unsteered, toward the context and toward memory, in one batch."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request

from juice.engine import GenerationRequest, Steer
from juice.errors import HeadSetNotFoundError
from juice.methods import TARGETS
from juice_server.routes.generate import timing_of
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.generate import Answer, CompareRequest, CompareResponse
from juice_server.schemas.shared import usage_of
from juice_server.service import Service, ServiceOf
from juice_server.trace import trace_of

router = APIRouter(route_class=StrictRoute)


@router.post("/compare")
async def compare(body: CompareRequest, request: Request, service: ServiceOf) -> CompareResponse:
    """Show what context and memory would each answer."""
    trace = trace_of(request.scope)
    if service.translator.settings.log_prompts:
        trace.prompts = [body.prompt]
    requests = await service.translator.off_loop(request, lambda: _requests(body, service))
    trace.priority = trace.client.priority
    trace.n_prompt_tokens = len(requests[0].prompt_ids)
    completions = await service.complete(request, requests)
    answers = {
        completion.steering.target: Answer(
            text=completion.text,
            finish_reason=completion.finish_reason,
            first_token=service.translator.texts.alternatives(completion.tokens[0]),
            steering=completion.steering,
        )
        for completion in completions
    }
    return CompareResponse(
        id=f"cmp-{uuid.uuid4().hex}",
        model=service.translator.model_name,
        answers=answers,
        disagree=len({answers[t].text.strip() for t in TARGETS}) > 1 if len(answers) > 2 else None,
        usage=usage_of(trace.n_prompt_tokens, trace.n_generated_tokens),
        timing=timing_of(completions, trace),
    )


def _requests(body: CompareRequest, service: Service) -> list[GenerationRequest]:
    ids = service.translator.tokens(body.prompt)
    service.translator.check_max_tokens(body.max_tokens)
    served = service.model.head_sets.targets()
    if not served:
        raise HeadSetNotFoundError(
            "there is nothing to compare: no head set named context or parametric has betas; "
            "see /v1/head_sets and `juice tune`"
        )
    steers = [
        Steer(target="none"),
        *(Steer(target=target, strength=body.strength) for target in served),
    ]
    return [
        service.model.request(
            ids,
            steer=steer,
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            seed=body.seed,
            top_logprobs=body.top,
        )
        for steer in steers
    ]
