"""POST /origins: each token of an answer, read unsteered with the context and without it."""

from __future__ import annotations

from fastapi import APIRouter, Request

from juice.engine import GenerationRequest
from juice.steered_model import origin_requests, origins_of
from juice_server.questions import prompt_asked
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.inside import OriginsRequest, OriginsResponse, TokenOrigin
from juice_server.service import ServiceOf
from juice_server.tokens import finite

router = APIRouter(route_class=StrictRoute)


@router.post("/origins")
async def origins(body: OriginsRequest, request: Request, service: ServiceOf) -> OriginsResponse:
    """Show whether the tokens of answers come from the context or from memory.

    What is likelier with the context than without it comes from there.
    """
    translator = service.translator
    prompt = await prompt_asked(translator, request, body)

    def work() -> list[GenerationRequest]:
        whole, alone = (
            translator.tokens(text, add_special_tokens=not body.is_chat)
            for text in (prompt.text, prompt.without_context or "")
        )
        return origin_requests(service.model, whole, alone, body.answers)

    requests = await translator.off_loop(request, work)
    done = await service.complete(request, requests)
    return OriginsResponse(
        origins=[
            [
                TokenOrigin(
                    id=own.id,
                    token=translator.texts[own.id],
                    with_context=finite(own.with_context),
                    without_context=finite(own.without_context),
                )
                for own in answer
            ]
            for answer in origins_of(done, body.answers)
        ]
    )
