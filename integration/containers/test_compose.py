"""compose.yaml with Debian's docker-compose: the service for CPUs, scraped by a Prometheus.

Prometheus comes from Debian's package, in an image built here, with the configuration that
compose.yaml gives it. Grafana is not in Debian, and no image can be pulled here: its dashboard's
queries are asked of this Prometheus as Grafana would ask them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
import yaml

from integration.containers.engine import Engine
from tests.support.serving import free_port, within

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "observability" / "grafana" / "dashboards" / "juice.json"
KEY = "the-key-of-the-file"
BEARER = {"authorization": f"Bearer {KEY}"}
PROMPT = "The capital of Peru is Cairo. The capital of Peru is"
PROMETHEUS = """
FROM {base}
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus \\
    && mkdir /prometheus && chown nobody /prometheus
USER nobody
ENTRYPOINT ["prometheus"]
"""
SCRAPES = 4  # that a rate of Grafana's spans, and this one does
# What Grafana writes in place of its variables, at this scrape interval.
VARIABLES = {"$__rate_interval": "20s", "$instance": ".*"}


def compose_command() -> list[str]:
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is missing here: apt-get install docker-compose")
    return ["docker-compose"]


@dataclass(frozen=True)
class Project:
    """What `docker-compose up` started."""

    engine: Engine
    files: list[str]
    variables: dict[str, str]

    @property
    def url(self) -> str:
        """Return the server's address."""
        return f"http://127.0.0.1:{self.variables['JUICE_PORT']}"

    @property
    def prometheus(self) -> str:
        """Return Prometheus' address."""
        return f"http://127.0.0.1:{self.variables['PROMETHEUS_PORT']}"

    def compose(self, *arguments: str) -> str:
        """Return what a command of docker-compose writes."""
        command = [*compose_command(), "--project-name=juice-test", *self.files, *arguments]
        return self.engine.run(command, timeout=3600, **self.variables)

    def inspect(self, service: str) -> dict[str, Any]:
        """Return what the engine knows about a service's container."""
        return self.engine.inspect(self.compose("ps", "--quiet", service))


@pytest.fixture(scope="module")
def project(
    engine: Engine, base: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("compose")
    keys = folder / "api_keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o644)
    (folder / "prometheus").mkdir()
    (folder / "prometheus" / "Dockerfile").write_text(PROMETHEUS.format(base=base))
    # What this machine cannot do: pull images, and let a build out of its network.
    build = {"network": "host", "args": {"BASE": base, "TORCH_INDEX": ""}}
    prometheus = {"image": "juice-prometheus", "build": {"context": str(folder / "prometheus")}}
    prometheus["build"]["network"] = "host"
    instead = folder / "instead.yaml"
    instead.write_text(
        yaml.safe_dump({"services": {"cpu": {"build": build}, "prometheus": prometheus}})
    )
    started = Project(
        engine,
        [f"--file={ROOT / 'compose.yaml'}", f"--file={instead}"],
        {
            "JUICE_API_KEYS_FILE": str(keys),
            "JUICE_PORT": str(free_port()),
            "PROMETHEUS_PORT": str(free_port()),
        },
    )
    started.compose("build", "cpu", "prometheus")
    started.compose("up", "--detach", "cpu", "prometheus")
    try:
        within(120, lambda: is_ready(started), "the server is ready")
        yield started
        server = started.inspect("cpu")["Id"]
        started.compose("stop", "cpu")
        assert engine.inspect(server)["State"]["ExitCode"] == 0
    finally:
        started.compose("down", "--volumes")


def is_ready(project: Project) -> bool:
    try:
        return httpx.get(f"{project.url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def generate(project: Project, **body: Any) -> httpx.Response:
    asked = {"prompt": PROMPT, "max_tokens": 8, **body}
    return httpx.post(f"{project.url}/generate", json=asked, headers=BEARER, timeout=60)


def test_a_key_of_the_secret_file_steers_and_no_other(project: Project) -> None:
    answer = generate(project, steer="parametric").json()
    assert answer["text"] == " Lima."
    assert answer["steering"]["head_set"] == "parametric"
    body = {"prompt": PROMPT}
    assert httpx.post(f"{project.url}/generate", json=body, timeout=60).status_code == 401


def test_the_container_is_restricted_as_the_file_says(project: Project) -> None:
    found = project.inspect("cpu")
    host = found["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    writable = {mount["Destination"]: mount["RW"] for mount in found["Mounts"]}
    assert writable == {"/models": True, "/head_sets": False, "/run/secrets/api_keys": False}
    within(120, lambda: project.inspect("cpu")["State"]["Health"]["Status"] == "healthy", "healthy")


def test_the_service_for_gpus_asks_for_them_and_shares_the_rest(project: Project) -> None:
    """Only read: nothing here has a GPU, and the engine refuses to start what it cannot give."""
    services = yaml.safe_load(project.compose("--profile=cpu", "config"))["services"]
    devices = services["juice"].pop("deploy")["resources"]["reservations"]["devices"]
    assert [(device["driver"], device["capabilities"]) for device in devices] == [
        ("nvidia", ["gpu"])
    ]
    for service in (services["juice"], services["cpu"]):
        for name in ("build", "image", "profiles", "shm_size"):
            service.pop(name, None)
    assert services["juice"] == services["cpu"]


def ask(project: Project, path: str, **query: str) -> Any:
    answer = httpx.get(f"{project.prometheus}/api/v1/{path}", params=query).json()
    assert answer["status"] == "success", answer
    return answer["data"]


def is_scraped(project: Project) -> bool:
    try:
        targets = ask(project, "targets")["activeTargets"]
    except httpx.TransportError:
        return False
    return [target["health"] for target in targets] == ["up"]


def scrapes(project: Project) -> int:
    found = ask(project, "query", query="sum(count_over_time(juice_engine_up[1h]))")["result"]
    return int(found[0]["value"][1]) if found else 0


@pytest.fixture(scope="module")
def scraped(
    project: Project, measured: dict[str, dict[str, Any]], software: dict[str, str]
) -> Iterator[Project]:
    """Keep every kind of request coming while Prometheus scrapes, and afterwards."""
    within(60, lambda: is_scraped(project), "Prometheus scrapes the server")
    done = Event()

    def load() -> None:
        while not done.is_set():
            for steer in ("none", "context", {"target": "parametric", "gate": "auto"}):
                assert generate(project, steer=steer).status_code == 200
            assert generate(project, prompt="Peru " * 2000).status_code == 400

    client = Thread(target=load, daemon=True)
    client.start()
    before = scrapes(project)
    within(120, lambda: scrapes(project) >= before + 2 * SCRAPES, "enough scrapes")
    yield project
    assert client.is_alive(), "a request failed"
    done.set()
    client.join(timeout=60)
    versions = {
        "docker-compose": project.compose("version", "--short"),
        "prometheus": ask(project, "status/buildinfo")["version"],
    }
    measured["compose"] = {
        "software": {**software, **versions},
        "services": ["cpu", "prometheus"],
        "scrapes": scrapes(project),
        "queries_with_an_answer": len(queries()),
    }


def queries() -> list[tuple[str, str]]:
    """Return the title and the expression of each query of the dashboard, variables filled in."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = [
        (f"{panel['title']} {target['refId']}", target["expr"])
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]
    for name, value in VARIABLES.items():
        found = [(title, query.replace(name, value)) for title, query in found]
    return found


@pytest.mark.parametrize(("title", "query"), queries(), ids=[title for title, _ in queries()])
def test_a_query_of_the_dashboard_has_an_answer(scraped: Project, title: str, query: str) -> None:
    assert "$" not in query
    values = [float(series["value"][1]) for series in ask(scraped, "query", query=query)["result"]]
    assert [value for value in values if math.isfinite(value)], "no series, or nothing in them"


def test_the_dashboards_variables_have_values(scraped: Project) -> None:
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(
                r"label_values\((\w+), (\w+)\)", variable["query"]
            ).groups()
            assert ask(scraped, f"label/{label}/values", **{"match[]": metric}) == ["juice:9000"]
