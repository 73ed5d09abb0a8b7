"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends

from juice.errors import RequestError
from juice_server.schemas.about import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from juice_server.service import Service, service_of
from juice_server.tokens import token_text

router = APIRouter()
ServiceOf = Annotated[Service, Depends(service_of)]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, service: ServiceOf) -> TokenizeResponse:
    """Return a text's tokens, as a prompt's would be."""

    def work() -> TokenizeResponse:
        ids = service.tokens(body.text, add_special_tokens=body.add_special_tokens, param="text") if body.text else ()
        texts = [token_text(service.model, token) for token in ids]
        return TokenizeResponse(tokens=list(ids), texts=texts, count=len(ids), max_model_len=service.max_model_len)

    return await asyncio.to_thread(work)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, service: ServiceOf) -> DetokenizeResponse:
    """Return the text of tokens."""
    n = service.model.loaded.vocabulary_size
    if body.tokens and max(body.tokens) >= n:
        raise RequestError(f"tokens names token {max(body.tokens)}; the model has tokens 0 to {n - 1}", param="tokens")
    text = await asyncio.to_thread(service.model.loaded.tokenizer.decode, body.tokens, clean_up_tokenization_spaces=False)
    return DetokenizeResponse(text=str(text))
