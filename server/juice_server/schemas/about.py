"""The bodies of the routes that do not generate."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from juice_server.schemas.shared import Body, TokenId, at_most


class TokenizeRequest(Body):
    """The body of POST /tokenize."""

    text: str
    add_special_tokens: bool = True


class TokenizeResponse(BaseModel):
    """Tokens as ids, and the text of each."""

    tokens: list[int]
    texts: list[str]
    count: int
    max_model_len: int | None


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True), at_most(1_000_000)]


class DetokenizeResponse(BaseModel):
    """The text of tokens."""

    text: str
