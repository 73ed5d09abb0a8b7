"""The arguments of the application, the files in deploy/ray, and how many replicas are needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml

from juice.errors import UsageError
from juice_server.on_ray import config
from juice_server.on_ray.autoscaling import PREFIX, needed, policy
from juice_server.on_ray.naming import deployment_name

FILES = sorted((Path(__file__).parents[3] / "deploy" / "ray").glob("*.yaml"))


def test_a_models_settings_go_before_the_common_ones() -> None:
    read = config.read(
        {
            "settings": {"max_batch": 4, "api_keys": ["k"], "kv_memory": "1GiB"},
            "models": {"a": {"settings": {"max_batch": 8}}, "b": {}},
        }
    )
    a, b = read.of_model("a"), read.of_model("b")
    assert (a.max_batch, b.max_batch, b.kv_memory) == (8, 4, 1 << 30)
    assert (a.served_model_name, a.api_keys) == ("a", None)
    assert read.of_ingress().needs_key


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "models: Field required"),
        ({"models": {}}, "models: Dictionary should have at least 1"),
        ({"models": {"a": {"replicas": 3}}}, "models.a.replicas: Extra inputs"),
        ({"models": {"a": {"settings": {"max_bach": 3}}}}, "max_bach is not a setting"),
        ({"models": {"a": {"settings": {"max_batch": 0}}}}, "max_batch"),
        ({"models": {"a": {"settings": {"port": 8000}}}}, "port is not for Ray Serve: use"),
        ({"settings": {"allow_head_set_changes": True}, "models": {"a": {}}}, "follow the folder"),
        ({"models": {"a": {"settings": {"api_keys": ["k"]}}}}, "api_keys holds for all models"),
    ],
)
def test_what_is_wrong_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config.read(arguments)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_files_configure_deployments_that_there_are(file: Path) -> None:
    (application,) = yaml.safe_load(file.read_text())["applications"]
    assert application["import_path"] == "juice_server.on_ray.application:application"
    read = config.read(application["args"])
    names = {deployment_name(name) for name in read.models}
    assert {own["name"] for own in application["deployments"]} <= names
    if any("autoscaling_config" in own for own in application["deployments"]):
        function = application["autoscaling_policy"]["policy_function"]
        assert function == f"{policy.__module__}:{policy.__name__}"


def test_full_replicas_are_all_needed_and_each_share_of_waiting_tokens_needs_one_more() -> None:
    def own(n_running: int, waiting_tokens: float) -> float:
        return needed(
            n_running=n_running, rows=10, waiting_tokens=waiting_tokens, tokens_of_a_replica=1000
        )

    assert own(20, 0) == 2
    assert own(20, 2500) == 4.5
    assert own(5, 0) == 0.5
    assert own(0, 0) == 0


class Id(NamedTuple):
    name: str
    app_name: str = "juice"


def test_the_policy_gives_each_model_what_the_ingress_reports_for_it() -> None:
    def context(**values: float) -> Any:
        metrics = {PREFIX + name: {"replica": value} for name, value in values.items()}
        return SimpleNamespace(aggregated_metrics={**metrics, "other": {"replica": 9.0}})

    contexts = {Id("a"): context(), Id("b"): context(), Id("ingress"): context(a=3.5, b=0)}
    assert policy(contexts)[0] == {Id("a"): 3.5, Id("b"): 0}


def test_the_policy_leaves_alone_what_nothing_is_reported_of() -> None:
    contexts = {Id("a"): SimpleNamespace(aggregated_metrics=None)}
    assert policy(contexts)[0] == {}
