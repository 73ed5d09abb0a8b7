"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from juice.errors import RequestError
from juice_server.chats import prompt_of
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.about import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from juice_server.service import ServiceOf

router = APIRouter(route_class=StrictRoute)


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, request: Request, service: ServiceOf) -> Response:
    """Return a text's tokens, tokenized like a prompt."""
    tokenizer = service.model.description.tokenizer

    def work() -> Response:
        text, add_special_tokens = body.text or "", body.add_special_tokens is not False
        if body.messages is not None:
            plain = [message.plain() for message in body.messages]
            prompt = prompt_of(service.translator, plain, options=body.for_template())
            text, add_special_tokens = str(prompt.text), False
        ids = (
            service.translator.tokens(
                text,
                add_special_tokens=add_special_tokens,
                param="text",
                is_to_fit=False,
            )
            if text
            else ()
        )
        texts = [service.translator.texts[token] for token in ids]
        answer = TokenizeResponse(
            tokens=list(ids),
            texts=texts,
            count=len(ids),
            max_model_len=service.translator.max_model_len,
            token_strs=tokenizer.convert_ids_to_tokens(list(ids))
            if body.return_token_strs
            else None,
        )
        return JSONResponse(answer.model_dump())

    return await service.translator.off_loop(request, work)


@router.post("/detokenize")
async def detokenize(
    body: DetokenizeRequest, request: Request, service: ServiceOf
) -> DetokenizeResponse:
    """Return the text of tokens."""
    n = service.model.description.vocabulary_size
    if body.tokens and max(body.tokens) >= n:
        raise RequestError(
            f"tokens names token {max(body.tokens)}; the model has tokens 0 to {n - 1}",
            param="tokens",
        )
    tokenizer = service.model.description.tokenizer
    text = await service.translator.off_loop(
        request, lambda: tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)
    )
    return DetokenizeResponse(text=str(text), prompt=str(text))
