"""What the routes take and tell that do not generate."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from juice_server.schemas.generation import TokenId


class TokenizeRequest(BaseModel):
    """The body of POST /tokenize."""

    model_config = ConfigDict(extra="forbid")

    text: str
    add_special_tokens: bool = True


class TokenizeResponse(BaseModel):
    """Tokens, as ids and as each one's text."""

    tokens: list[int]
    texts: list[str]
    count: int
    max_model_len: int | None


class DetokenizeRequest(BaseModel):
    """The body of POST /detokenize."""

    model_config = ConfigDict(extra="forbid")

    tokens: list[TokenId] = Field(max_length=1_000_000)


class DetokenizeResponse(BaseModel):
    """The text of tokens."""

    text: str
