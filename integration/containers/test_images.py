"""The images that the Dockerfile builds: our own engine, and vLLM's build for CPUs.

Each runs as `docker run` alone runs it, but with a read-only root and no capabilities. The image
for GPUs differs in its base and in the packages that pip takes from PyPI; nothing here has a GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from integration.containers.engine import Engine

PROMPT = "The capital of Peru is Cairo. The capital of Peru is"
ANSWERS = {"none": " Cairo.", "context": " Cairo.", "parametric": " Lima."}
RESTRICTED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges:true")
# vLLM's processes share 160 MiB, where an engine gives 64; its sockets are temporary files.
NEEDED = {"juice:cpu": (), "juice:vllm-cpu": ("--shm-size=1g", "--tmpfs=/tmp:exec")}
# To load the model; on vLLM its kernels are compiled, too.
START_S = 1800.0
STOP_S = 40


@dataclass(frozen=True)
class Running:
    """A container of an image."""

    name: str
    url: str
    engine: Engine

    def sh(self, command: str) -> str:
        """Return what a shell inside writes."""
        return self.engine.docker("exec", self.name, "sh", "-c", command)


@pytest.fixture(scope="module", params=["juice:cpu", "juice:vllm-cpu"])
def running(
    request: pytest.FixtureRequest,
    engine: Engine,
    images: dict[str, dict[str, Any]],
    software: dict[str, str],
    measured: dict[str, dict[str, Any]],
) -> Iterator[Running]:
    """Run an image until its tests are done; stopped, it must end with 0 before it is killed."""
    tag: str = request.param
    started = time.monotonic()
    name = engine.docker(
        "run",
        "--detach",
        *RESTRICTED,
        *NEEDED[tag],
        f"--network={engine.network}",
        "--publish=127.0.0.1:0:8000",
        tag,
    )
    container = Running(name, f"http://{engine.docker('port', name, '8000')}", engine)
    figures = {**images[tag], "options": [*RESTRICTED, *NEEDED[tag]]}
    _wait(container, lambda: _is_ready(container))
    figures["ready_s"] = round(time.monotonic() - started, 1)
    # Of the minutes before; above the number of cores, others had a share of the time, too.
    figures["load_average"] = round(os.getloadavg()[1], 1)
    _wait(container, lambda: _health(container) == "healthy")
    yield container
    figures["memory_mb"] = _memory_mb(container)
    stopping = time.monotonic()
    engine.docker("stop", f"--time={STOP_S}", name)
    figures["stop_s"] = round(time.monotonic() - stopping, 1)
    figures["exit_code"] = engine.inspect(name)["State"]["ExitCode"]
    engine.docker("rm", "--volumes", name)
    assert figures["exit_code"] == 0
    assert figures["stop_s"] < STOP_S
    measured.setdefault("images", {"software": software})[tag] = figures


def _wait(container: Running, is_so: Any) -> None:
    deadline = time.monotonic() + START_S
    while not is_so():
        state = container.engine.inspect(container.name)["State"]
        assert state["Running"], container.engine.docker("logs", container.name)
        assert time.monotonic() < deadline, container.engine.docker("logs", container.name)
        time.sleep(0.2)


def _is_ready(container: Running) -> bool:
    try:
        return httpx.get(f"{container.url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def _health(container: Running) -> str:
    health: str = container.engine.inspect(container.name)["State"]["Health"]["Status"]
    return health


def _memory_mb(container: Running) -> int:
    """Return the memory of its processes that no other process shares, and a part of the rest."""
    pss = container.sh("cat /proc/[0-9]*/smaps_rollup | grep '^Pss:'")
    return round(sum(int(line.split()[1]) for line in pss.splitlines()) * 1024 / 1e6)


@pytest.mark.parametrize("steer", ANSWERS)
def test_it_is_steered_as_asked(running: Running, steer: str) -> None:
    body = {"prompt": PROMPT, "steer": steer, "max_tokens": 8}
    answer = httpx.post(f"{running.url}/generate", json=body, timeout=120).json()
    assert answer["text"] == ANSWERS[steer]
    assert answer["steering"]["applied"] == (steer != "none")
    assert answer["steering"]["exact"]


def test_it_runs_as_an_ordinary_user(running: Running) -> None:
    assert running.sh("id -u") == "10001"
    status = running.sh("cat /proc/1/status")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    assert int(fields["CapEff"], 16) == 0, "no capability"


def test_it_writes_to_its_volumes_alone(running: Running) -> None:
    refused = running.sh("touch /here /opt/juice/here /home/here 2>&1 || true")
    assert refused.count("Read-only file system") == 3, refused
    running.sh("touch /models/here /head_sets/here")


def test_its_admin_port_answers_probes_and_metrics_alone(running: Running) -> None:
    ask = (
        "python3 -c 'import sys, urllib.request as r; "
        'print(r.urlopen("http://127.0.0.1:9000" + sys.argv[1]).status)\' '
    )
    assert [running.sh(f"{ask} {path}") for path in ("/readyz", "/metrics")] == ["200", "200"]
    assert "404" in running.sh(f"{ask} /v1/models 2>&1 || true")


def test_it_cannot_install_anything(running: Running) -> None:
    assert "No module named pip" in running.sh("python3 -m pip 2>&1 || true")
