"""The server's settings: flags win over the environment (JUICE_*), which wins over defaults.

Kubernetes sets such variables, too, which are ignored; any other that is no setting is a mistake.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from juice.engine.load_options import EngineOptions, Limits, LoadOptions
from juice.engine.queue import with_room
from juice.errors import UsageError, first_problem
from juice_server.keys import Keys
from juice_server.telemetry.logs import LogFormat
from juice_server.tools import FormatName

PREFIX = "JUICE_"
TESTS = "JUICE_TEST_"
# What Kubernetes sets in every container for a Service that is called juice, or juice-something.
INJECTED = re.compile(
    r"JUICE_([A-Z0-9_]+_)?"
    r"(SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
PORT = re.compile(r"JUICE_([A-Z0-9_]+_)?PORT")
URL = re.compile(r"(tcp|udp|sctp)://.*")
CLOSE = 0.85  # how alike two names must be for a guess


class Environment(EnvSettingsSource):
    """The environment as a source of settings, without what Kubernetes sets."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        value, key, is_complex = super().get_field_value(field, field_name)
        if isinstance(value, str) and is_injected(f"{PREFIX}{field_name.upper()}", value):
            value = None
        return value, key, is_complex


def is_injected(name: str, value: str) -> bool:
    """Return whether Kubernetes sets a variable for a Service; it is not a setting then."""
    # JUICE_PORT itself is a setting, and a number; Kubernetes gives it a URL.
    return bool(INJECTED.fullmatch(name) or (PORT.fullmatch(name) and URL.fullmatch(value)))


def injected_names() -> list[str]:
    """Return the variables of the environment that Kubernetes sets for a Service."""
    return sorted(name for name, value in os.environ.items() if is_injected(name, value))


def check_names(settings: Collection[str]) -> None:
    """Raise UsageError for a variable JUICE_* that is none of these settings, but misspelt."""
    known = [f"{PREFIX}{name.upper()}" for name in settings]
    for name, value in os.environ.items():
        is_ours = name.startswith(PREFIX) and not name.startswith(TESTS)
        if is_ours and name not in known and not is_injected(name, value):
            close = get_close_matches(name, known, n=1, cutoff=CLOSE)
            raise UsageError(
                f"the environment sets {name}, which is not a setting"
                + (f"; did you mean {close[0]}?" if close else "")
            )


MIB = 1 << 20
OPENTELEMETRY = ("grpc", "opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _split(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return [part for part in map(str.strip, value.split(",")) if part]


def _usable(keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    values = [key.get_secret_value() for key in keys]
    if not values or not all(values) or any(value != value.strip() for value in values):
        raise ValueError(
            "set, but without a key, or with one that is empty or begins or ends with a space; "
            "unset it to serve everybody"
        )
    return keys


def _prefix(path: str) -> str:
    if path and not re.fullmatch(r"(/[\w.~-]+)+", path):
        raise ValueError("expected a path without a slash at its end, such as /juice")
    return path


def _collector(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "grpc") or not parts.hostname:
        raise ValueError(
            "expected the URL of a collector, such as http://localhost:4317 for gRPC or"
            " http://localhost:4318/v1/traces for HTTP"
        )
    if any(find_spec(package) is None for package in OPENTELEMETRY):
        raise ValueError(
            "OpenTelemetry is not installed; install it with: pip install 'juice-steering[otel]'"
        )
    return url


class Settings(BaseSettings, LoadOptions, EngineOptions):
    """The model that is served, its clients, and all bounds. Durations are in seconds.

    Every field is a flag of `juice serve` of the same name, except `api_keys` and `vllm_args`:
    their flags are `--api-key` and `--vllm-arg name=value`, both repeatable.
    """

    model_config = SettingsConfigDict(
        env_prefix="JUICE_",
        protected_namespaces=(),
        extra="ignore",
        use_attribute_docstrings=True,
    )

    model: str = "mini"
    """A hub id, a local folder, a .gguf file, or `mini`."""
    served_model_name: str | None = None
    """What clients call the model; else the value of --model."""
    chat_template: str | None = Field(
        default=None,
        description="The template of /v1/chat/completions: `default` for the tokenizer's own, "
        "or a Jinja file; else the tokenizer's own where it has one.",
    )
    tool_format: FormatName = Field(
        default="auto",
        description="How the model writes calls of functions: hermes, qwen3_coder, llama3, mistral,"
        " json, or auto to tell it from its tokenizer and chat template.",
    )
    head_sets: Path | None = None
    """Folder of head sets; else ./head_sets, the shipped ones."""
    default_steer: Literal["none", "context", "parametric"] = "none"
    """How to steer requests without steer: none, context or parametric."""
    default_gate: Literal["auto", "off"] = Field(
        default="off",
        description="Whether requests without a gate are steered always (off), or where the head"
        " set's gate finds a reason to (auto).",
    )

    max_inline_heads: int | None = Field(default=None, ge=0)
    """Heads that a request may name itself, in place of a head set; 0 for none; else any number."""
    max_inline_coefficient: float | None = Field(default=None, gt=0)
    """The largest coefficient of such a head, strength included; else any."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on."""
    api_keys: (
        Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split), AfterValidator(_usable)]
        | None
    ) = None
    api_keys_file: Path | None = None
    """A file with one key per line, or a .toml file with what each may do."""
    root_path: Annotated[str, AfterValidator(_prefix)] = ""
    """The prefix under which a proxy offers the server, such as /juice."""
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = ()
    """Hosts beside localhost by which it may be asked without keys, separated by commas; or *."""
    cors_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = ()
    """Origins of web pages that may send requests, separated by commas."""

    max_connections: int = Field(default=1000, ge=1)
    """Open connections, or as many as the system allows."""
    max_connections_per_address: int | None = Field(default=None, ge=1)
    """Open connections of one address; else nine tenths of all."""
    admin_port: int | None = Field(default=None, ge=0, le=65535)
    """A port for probes and metrics alone, without keys; else they share --port."""
    max_batch: int = Field(default=32, ge=1, le=4096)
    """Generations of one client that run at the same time; of all, an eighth more."""
    max_queue: int = Field(default=256, ge=1, le=1_000_000)
    """Generations of a client that may wait, else 429; of all, an eighth more."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Tokens of prompt and answer; else the model's context."""
    kv_memory: ByteSize | None = Field(default=None, ge=MIB)
    """Memory for keys and values, such as 8GiB; else a share of what is free."""
    max_prefill_tokens: int | None = Field(default=None, ge=1)
    """Cost of a step, in tokens of a short prompt; else 2048, fewer for a large model on a CPU."""

    max_tokens: int | None = Field(default=None, ge=1)
    """New tokens that a request may ask for; else the context."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a prompt; else the context."""
    max_prompt_characters: int = Field(default=1_000_000, ge=1)
    """Characters of a prompt."""
    max_prompts: int = Field(default=1024, ge=1, le=1024)
    """Prompts of a request."""
    max_n: int = Field(default=128, ge=1, le=128)
    """Choices of a prompt."""
    max_body: ByteSize = Field(default=ByteSize(2 * MIB), ge=1024)
    """Size of a request's body, such as 2MiB."""
    request_timeout: float = Field(default=300, gt=0)
    """Seconds for a request."""
    header_timeout: float = Field(default=10, gt=0)
    """Seconds for headers to arrive."""
    body_timeout: float = Field(default=30, gt=0)
    """Seconds for a body to arrive."""
    write_stall: float = Field(default=30, gt=0)
    """Seconds that a client may go without reading."""
    drain: float = Field(default=30, ge=0)
    """Seconds to finish what runs after SIGTERM."""
    lame_duck: float = Field(default=0, ge=0)
    """Seconds after SIGTERM in which /readyz fails, but requests are still taken."""
    engine_timeout: float = Field(default=60, gt=0)
    """Seconds without a step, or a layer of one, after which the engine is stuck."""
    log_format: LogFormat = "text"
    """Lines of the log: text to read, or json."""
    log_prompts: bool = False
    """Put prompts into the log."""
    otlp_traces_endpoint: Annotated[str, AfterValidator(_collector)] | None = None
    """Where OpenTelemetry traces go, such as http://localhost:4317; else nowhere."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_sources: Any,
        **_by_name: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, Environment(settings_cls)

    def load_options(self) -> dict[str, Any]:
        """Return the options for `juice.load`, with the bounds of the engine."""
        limits = Limits(
            max_batch=with_room(self.max_batch),
            max_model_len=self.max_model_len,
            kv_memory_bytes=self.kv_memory,
            max_prefill_tokens=self.max_prefill_tokens,
        )
        options = self.model_dump(include={*LoadOptions.model_fields, *EngineOptions.model_fields})
        return {**options, "head_sets": self.head_sets, "limits": limits}

    def read_keys(self) -> Keys | None:
        """Return the keys, None where nobody needs one; raises UsageError for a wrong file."""
        if not self.needs_key:
            return None
        return Keys([key.get_secret_value() for key in self.api_keys or ()], self.api_keys_file)

    @property
    def is_open(self) -> bool:
        """Whether other machines can reach the server, and anybody may use it."""
        return self.host not in LOOPBACK and not self.needs_key

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """The hosts beside localhost by which it may be asked; None: any.

        So it is where whoever asks has a key, or may be on another machine.
        """
        is_checked = self.host in LOOPBACK and not self.needs_key and "*" not in self.allowed_hosts
        return self.allowed_hosts if is_checked else None

    @property
    def needs_key(self) -> bool:
        """Whether clients need a key."""
        return self.api_keys is not None or self.api_keys_file is not None

    def public(self) -> dict[str, Any]:
        """Return the settings as plain data, without secrets; for text, those that were set."""
        is_short = self.log_format == "text"
        shown = self.model_dump(mode="json", exclude={"api_keys"}, exclude_defaults=is_short)
        return {**shown, "api_keys": len(self.api_keys or ())}


def read(flags: Mapping[str, Any]) -> Settings:
    """Return the settings, with these flags; raises a UsageError that names the wrong setting."""
    check_names(Settings.model_fields)
    try:
        return Settings(**flags)
    except ValidationError as error:
        path, problem = first_problem(error)
        name = path.partition(".")[0]
        got = "" if name == "api_keys" else f" {error.errors()[0]['input']!r}"
        raise UsageError(f"the setting {name} (JUICE_{name.upper()}) is{got}: {problem}") from error
