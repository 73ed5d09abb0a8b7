"""The `args` of the application in Ray Serve's YAML file, and the model that a request is for.

`settings` are those of `juice serve`, for all models; `models` has each under the name that clients
use, with settings of its own. How many replicas there are, and on what, `deployments` say.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.types import Scope

from juice.errors import UsageError, first_problem
from juice.formula import STEER_TARGETS
from juice_server import settings as settings_module
from juice_server.errors import UnknownModelError
from juice_server.settings import Settings

# Settings of a process that listens by itself; here Ray Serve listens.
UNBOUNDED = ("max_connections", "max_connections_per_address", "header_timeout", "write_stall")
NOT_HERE = {
    "host": "use http_options: host",
    "port": "use http_options: port",
    "allowed_hosts": "Ray Serve's proxy is asked by any host",
    "admin_port": "/readyz is on the port of Ray Serve, and Ray exports metrics on each host",
    **dict.fromkeys(UNBOUNDED, "Ray Serve's proxy has no such bound; put a proxy before it"),
    "lame_duck": "Ray Serve stops sending to a replica before it ends it",
    "served_model_name": "it is the key in models",
}
OF_THE_INGRESS = ("api_keys", "api_keys_file", "cors_origins", "max_body", "body_timeout")
ONE_MODEL = "/v1/models/"


class ModelArguments(BaseModel):
    """One model: its `settings` go before the common ones."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any] = {}


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
        flags = _here(self.models[name].settings, where)
        for setting in OF_THE_INGRESS:
            if setting in flags:
                raise UsageError(f"{where}: {setting} holds for all models; put it into settings")
        common = {k: v for k, v in self.settings.items() if k not in OF_THE_INGRESS}
        return {**common, **flags, "served_model_name": name}

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


def deployment_name(model: str) -> str:
    """Return the name of the deployment that serves a model: as of its folder of head sets."""
    return model.replace("/", "--")


def _here(flags: dict[str, Any], where: str) -> dict[str, Any]:
    for name in flags:
        if name in NOT_HERE:
            raise UsageError(f"{where}: {name} is not for Ray Serve: {NOT_HERE[name]}")
        if name not in Settings.model_fields:
            raise UsageError(f"{where}: {name} is not a setting of juice serve")
    return flags


def model_of(scope: Scope, body: bytes, served: Collection[str]) -> str:
    """Return the model that the body names, else `?model=`, the path, or the first that is served.

    Raises UnknownModelError; what else is wrong with the request its replica says.
    """
    try:
        fields = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        fields = {}
    name = fields.get("model") if isinstance(fields, dict) else None
    if not isinstance(name, str):
        name = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"))).get("model")
    if name is None and scope["path"].startswith(ONE_MODEL):
        name = scope["path"].removeprefix(ONE_MODEL)
    if name is None:
        return next(iter(served))
    plain, _, target = name.rpartition(":")
    for known in (name, plain if target in STEER_TARGETS else name):
        if known in served:
            return known
    raise UnknownModelError(
        f"the model {name!r} is not served; expected one of {', '.join(served)}, see /v1/models",
        param="model",
    )


def without_model(query: bytes) -> bytes:
    """Return a query without the name of the model, which is for the ingress."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    return urlencode([pair for pair in pairs if pair[0] != "model"]).encode()
