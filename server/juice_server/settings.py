"""The server's settings: environment variables JUICE_*, the only place that reads them; `juice serve` sets them from its flags."""

from __future__ import annotations

from pydantic_settings import BaseSettings, SettingsConfigDict


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
