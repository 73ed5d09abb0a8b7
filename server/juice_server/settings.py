"""The server's settings: flags first, then environment variables JUICE_*, read here alone, then defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from juice.errors import UsageError


class Settings(BaseSettings):
    """What the server serves and where."""

    model_config = SettingsConfigDict(env_prefix="JUICE_", protected_namespaces=())

    model: str = "mini"
    head_sets: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "auto"
    dtype: str = "auto"
    revision: str | None = None
    attn_implementation: str | None = None


def read(flags: Mapping[str, Any]) -> Settings:
    """Return the settings, flags before environment; raises UsageError that names the one that is wrong."""
    try:
        return Settings(**flags)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"JUICE_{str(first['loc'][0]).upper()} is {first['input']!r}: {first['msg']}") from error
