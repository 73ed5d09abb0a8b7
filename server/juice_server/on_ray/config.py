"""What is served on a Ray cluster: the `args` of the application in Ray Serve's YAML file.

`settings` are those of `juice serve`, for all models; `models` has each under the name that clients
use, with settings of its own. How many replicas there are, and on what, is Ray Serve's to say,
under `deployments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from juice.errors import UsageError
from juice.options import first_problem
from juice_server import settings as settings_module
from juice_server.settings import Settings

# Settings of a process that listens by itself; here Ray Serve listens.
NOT_HERE = {
    "host": "use http_options: host",
    "port": "use http_options: port",
    "admin_port": "/readyz and /metrics are on the one port of Ray Serve",
    "max_connections": "Ray Serve's proxy has no such bound; put a proxy before it",
    "max_connections_per_address": "Ray Serve's proxy has no such bound; put a proxy before it",
    "header_timeout": "Ray Serve's proxy has no such bound; put a proxy before it",
    "write_stall": "Ray Serve's proxy has no such bound; put a proxy before it",
    "lame_duck": "Ray Serve stops sending to a replica before it ends it",
    "served_model_name": "it is the key in models",
    "allow_head_set_changes": "replicas follow the folder in head_sets; change the sets there",
}
OF_THE_INGRESS = ("api_keys", "api_keys_file", "cors_origins", "max_body", "body_timeout")


class ModelArguments(BaseModel):
    """One model: its `settings` go before the common ones.

    `waiting_tokens` is how many tokens wait for each replica that autoscaling adds.
    """

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any] = {}
    waiting_tokens: int = Field(default=4096, ge=1)


class Arguments(BaseModel):
    """The arguments of the application."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any] = {}
    models: dict[str, ModelArguments] = Field(min_length=1)

    def of_ingress(self) -> Settings:
        """Return the settings that hold for every model; raises UsageError."""
        return settings_module.read(_here(self.settings, "settings"))

    def flags_of(self, name: str) -> dict[str, Any]:
        """Return the settings of a model that were given; raises UsageError."""
        where = f"models.{name}.settings"
        own = _here(self.models[name].settings, where)
        for setting in OF_THE_INGRESS:
            if setting in own:
                raise UsageError(f"{where}: {setting} holds for all models; put it into settings")
        common = {k: v for k, v in self.settings.items() if k not in OF_THE_INGRESS}
        return {**common, **own, "served_model_name": name}

    def of_model(self, name: str) -> Settings:
        """Return the settings of a model; raises UsageError."""
        return settings_module.read(self.flags_of(name))


def read(arguments: Mapping[str, Any]) -> Arguments:
    """Return the arguments, checked with all settings in them; raises UsageError."""
    try:
        read = Arguments.model_validate(arguments)
    except ValidationError as error:
        field, problem = first_problem(error)
        raise UsageError(f"the application's args: {field}: {problem}") from error
    read.of_ingress()
    for name in read.models:
        read.of_model(name)
    return read


def _here(flags: dict[str, Any], where: str) -> dict[str, Any]:
    for name in flags:
        if name in NOT_HERE:
            raise UsageError(f"{where}: {name} is not for Ray Serve: {NOT_HERE[name]}")
        if name not in Settings.model_fields:
            raise UsageError(f"{where}: {name} is not a setting of juice serve")
    return flags
