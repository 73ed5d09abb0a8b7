"""The page about many machines: its start commands, its unit and its excerpt fit what is tested."""

from __future__ import annotations

import configparser
import re
from typing import Any

import yaml

from integration.ray.machines import ENVIRONMENT
from tests.support.page_blocks import ROOT, Block, blocks

PAGE = ROOT / "docs" / "how-to" / "many-machines.md"
TEN = ROOT / "deploy" / "ray" / "ten-replicas.yaml"
FILE = "/etc/juice/ray.env"
# What Ray itself has, by the page; the tests repeat them.
DEFAULTS = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
}


def the_block(language: str, part: str) -> Block:
    (found,) = [
        block for block in blocks(PAGE) if block.language == language and part in block.text
    ]
    return found


def variables() -> dict[str, str]:
    """Return what the page writes into the file for Ray."""
    text = the_block("sh", f"cat > {FILE} <<END\n").text
    (body,) = re.findall(r"(?ms)<<END$\n(.*?)^END$", text)
    return dict(line.split("=", 1) for line in body.splitlines())


def test_ray_starts_as_in_the_tests_of_two_machines() -> None:
    """The times that the page shows hold with these health checks only; and Ray reports nothing."""
    values = variables()
    assert values["RAY_AUTH_MODE"] == "token"
    assert values["RAY_AUTH_TOKEN"]
    assert values["RAY_USAGE_STATS_ENABLED"] == ENVIRONMENT["RAY_USAGE_STATS_ENABLED"] == "0"
    tested = {name: value for name, value in ENVIRONMENT.items() if "health_check" in name}
    assert {name: values.get(name, DEFAULTS.get(name)) for name in tested} == tested
    page = PAGE.read_text()
    for name in ("period_ms", "failure_threshold"):
        name = f"RAY_health_check_{name}"
        assert re.search(rf"`{name}`\s\({DEFAULTS[name]}\)", page)


def test_whatever_starts_ray_reads_that_file() -> None:
    assert f". {FILE}\nray start --head" in the_block("sh", "ray start").text
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(the_block("ini", "[Service]").text)
    assert unit["Service"]["EnvironmentFile"] == FILE
    assert unit["Service"]["ExecStart"].endswith("ray start --block --address=HEAD:6379")
    for place in (PAGE, *TEN.parent.glob("*.yaml")):
        for line in re.findall(r"(?m)^.*\bserve run .*$", place.read_text()):
            assert "RAY_USAGE_STATS_ENABLED=0 serve run" in line, "it starts Ray itself"


def test_the_page_shows_and_makes_what_the_file_for_ten_replicas_has() -> None:
    (application,) = yaml.safe_load(TEN.read_text())["applications"]
    shown = yaml.safe_load(the_block("yaml", "num_replicas: 10").text)
    assert is_part(shown, application)
    settings, page = application["args"]["settings"], PAGE.read_text()
    (model,) = application["args"]["models"].values()
    assert f"`{settings['api_keys_file']}` on the head" in page
    assert f"`{settings['head_sets']}` on every host" in page
    found = the_block("sh", "juice identify").text.split()
    assert found[found.index("--model") + 1] == model["settings"]["model"]
    assert found[found.index("--out") + 1] == settings["head_sets"]
    assert "HF_TOKEN" in variables()


def is_part(shown: Any, whole: Any) -> bool:
    """Return whether all that is shown is in the whole, at the same places."""
    if isinstance(shown, dict):
        return all(name in whole and is_part(each, whole[name]) for name, each in shown.items())
    if isinstance(shown, list):
        return len(shown) == len(whole) and all(map(is_part, shown, whole))
    return bool(shown == whole)
