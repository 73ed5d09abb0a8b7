"""compose.yaml and the page about containers, without an engine that runs them."""

from __future__ import annotations

import re

import yaml

from juice_server.process import CLOSING_S, LAST_WORDS_S
from juice_server.settings import Settings
from tests.support.page_blocks import ROOT

SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
SERVERS = [SERVICES["juice"], SERVICES["cpu"]]
PAGE = ROOT / "docs" / "how-to" / "container.md"


def test_a_container_gets_more_time_to_stop_than_the_server_takes_whatever_hangs() -> None:
    fields = Settings.model_fields
    longest = fields["lame_duck"].default + fields["drain"].default + LAST_WORDS_S + CLOSING_S
    for service in SERVERS:
        assert int(service["stop_grace_period"].removesuffix("s")) > longest
    (seconds,) = re.findall(r"docker stop --time (\d+)", PAGE.read_text())
    assert int(seconds) > longest


def test_what_the_page_sets_reaches_the_server() -> None:
    """A variable without a value is that of the shell, where it is set there."""
    for service in SERVERS:
        assert service["environment"].items() >= {"JUICE_TP": None, "HF_TOKEN": None}.items()
        assert service["environment"]["JUICE_HEAD_SETS"] == "/head_sets"
        assert "./head_sets:/head_sets:ro" in service["volumes"]


def test_nobody_can_log_in_to_grafana() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    assert "GF_AUTH_ANONYMOUS_ORG_ROLE" not in environment, "by default it may look only"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false", "its API takes a password, too"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true", (
        "no admin with admin"
    )
    for name in ("grafana", "prometheus"):
        assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])
