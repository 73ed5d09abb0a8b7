"""A cluster for the tests, and the record of what was measured."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import rig
from integration.ray.machines import ROOT, Machine, Machines, machines, missing, within

LOG = logging.getLogger(__name__)
CONFIG = ROOT / "integration" / "ray" / "cluster.yaml"
RESULTS = pytest.StashKey[dict[str, Any]]()


@dataclass
class Cluster:
    """The cluster of the tests: a head and one worker, both with a replica of mini."""

    machines: Machines
    worker: Machine

    @property
    def url(self) -> str:
        return f"http://{self.machines.head.address}:8000"

    def deploy(self, config: Path) -> None:
        self.machines.head.run("serve", "deploy", str(config))

    def replicas(self) -> dict[str, int]:
        """Return how many replicas each model has; none while nothing answers."""
        try:
            state: dict[str, int] = httpx.get(f"{self.url}/readyz", timeout=5).json()["replicas"]
        except (httpx.TransportError, KeyError, ValueError):
            return {}
        return state


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    with machines(tmp_path_factory.mktemp("machines")) as made:
        try:
            made.start_head(n_cpus=1)
            within(300, lambda: n_machines(made) == 1, "the head is up", every_s=3)
            running = Cluster(made, made.start_worker(n_cpus=1))
            within(300, lambda: n_machines(made) == 2, "two machines", every_s=3)
            running.deploy(CONFIG)
            every = {"mini": 2, "remembering": 1}
            within(300, lambda: running.replicas() == every, "every replica", every_s=1)
            yield running
        finally:
            for machine in made.all:
                LOG.warning("%s: %s", machine.name, machine.log()[-2000:])


def n_machines(made: Machines) -> int:
    """Return how many machines the head knows; 0 while it does not answer."""
    try:
        return made.head.run("ray", "status").count(" node_")
    except AssertionError:
        return 0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run write what it measured."""
    parser.addoption("--write-results", type=Path, help="write what was measured to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = {}


@pytest.fixture
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a test measures, under its own name."""
    each: dict[str, Any] = {}
    request.config.stash[RESULTS][request.node.name.removeprefix("test_")] = each
    return each


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write what was measured, if the option asks for it; fail if that is nothing."""
    path: Path | None = session.config.getoption("--write-results")
    if path and exitstatus == 0 and not session.config.stash[RESULTS]:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    elif path and exitstatus == 0:
        facts = {
            "ray": version("ray"),
            "machines": "network namespaces",
            "machine": rig.machine(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        everything = {"facts": facts, **session.config.stash[RESULTS]}
        path.write_text(json.dumps(everything, indent=1) + "\n")
