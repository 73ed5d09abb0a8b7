"""The variables JUICE_* of the environment: settings, those of Kubernetes, and mistakes."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource

from juice.errors import UsageError

PREFIX = "JUICE_"
TESTS = "JUICE_TEST_"
# What Kubernetes sets in every container for a Service that is called juice, or juice-something.
SERVICE = re.compile(r"JUICE_([A-Z0-9_]+_)?SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)")
ADDRESS = re.compile(r"JUICE_([A-Z0-9_]+_)?PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
PORT = re.compile(r"JUICE_([A-Z0-9_]+_)?PORT")
URL = re.compile(r"(tcp|udp|sctp)://.*")
CLOSE = 0.85  # how alike two names must be for a guess


class Environment(EnvSettingsSource):
    """The environment as a source of settings, without what Kubernetes sets."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return a setting's value as given, None where it is not a setting's."""
        value, key, is_complex = super().get_field_value(field, field_name)
        if isinstance(value, str) and is_injected(f"{PREFIX}{field_name.upper()}", value):
            value = None
        return value, key, is_complex


def is_injected(name: str, value: str) -> bool:
    """Return whether Kubernetes sets a variable for a Service, which is no setting then."""
    # JUICE_PORT itself is a setting, and a number; Kubernetes gives it a URL.
    is_url = PORT.fullmatch(name) and URL.fullmatch(value)
    return bool(SERVICE.fullmatch(name) or ADDRESS.fullmatch(name) or is_url)


def injected_names() -> list[str]:
    """Return the variables of the environment that Kubernetes sets for a Service."""
    return sorted(name for name, value in os.environ.items() if is_injected(name, value))


def check_names(settings: Collection[str]) -> None:
    """Raise UsageError for a variable JUICE_* that is not one of these settings.

    A misspelt limit or key must not be ignored.
    """
    known = [f"{PREFIX}{name.upper()}" for name in settings]
    for name, value in os.environ.items():
        if name in known or not name.startswith(PREFIX) or name.startswith(TESTS):
            continue
        if not is_injected(name, value):
            close = get_close_matches(name, known, n=1, cutoff=CLOSE)
            raise UsageError(
                f"the environment sets {name}, which is not a setting"
                + (f"; did you mean {close[0]}?" if close else "")
            )
