"""A server started, probed and ended as Kubernetes would do it, from the chart's own manifests.

Arguments, variables and probe paths are the manifest's; the image's are the Dockerfile's.
"""

from __future__ import annotations

import hashlib
import io
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from dockerfile_parse import DockerfileParser

from integration.deploy.helm import NEEDS_HELM, ROOT, VALUES, rendered, the
from integration.deploy.kubelet import Container, write_volume
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Betas
from juice_server import settings
from tests.support.serving import CONFLICT, LONG, free_port, within

pytestmark = NEEDS_HELM
KEY = "a-key-of-this-test"
BEARER = {"authorization": f"Bearer {KEY}"}
SHORT = {"prompt": CONFLICT, "max_tokens": 2}


def keys_file(*keys: str) -> str:
    return "".join(
        f'[[keys]]\nname = "key-{i}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n'
        for i, key in enumerate(keys)
    )


def service_variables(manifests: list[dict[str, Any]]) -> dict[str, str]:
    """Return what Kubernetes sets for the Services of the chart if service links are on.

    A headless Service gets no variables; its are added, since another may have that name.
    """
    variables = {}
    for service in (manifest for manifest in manifests if manifest["kind"] == "Service"):
        name = service["metadata"]["name"].upper().replace("-", "_")
        ports = service["spec"]["ports"]
        variables[f"{name}_SERVICE_HOST"] = "10.0.0.7"
        variables[f"{name}_SERVICE_PORT"] = str(ports[0]["port"])
        variables[f"{name}_PORT"] = f"tcp://10.0.0.7:{ports[0]['port']}"
        for port in ports:
            number = port["port"]
            variables[f"{name}_SERVICE_PORT_{port['name'].upper()}"] = str(number)
            variables[f"{name}_PORT_{number}_TCP"] = f"tcp://10.0.0.7:{number}"
            variables[f"{name}_PORT_{number}_TCP_PROTO"] = "tcp"
            variables[f"{name}_PORT_{number}_TCP_PORT"] = str(number)
            variables[f"{name}_PORT_{number}_TCP_ADDR"] = "10.0.0.7"
    return variables


@contextmanager
def running(
    folder: Path, *, lame_duck: int = 0, with_service_links: bool = False
) -> Iterator[Container]:
    """Run the chart's container on the bundled model; its keys and head sets come from outside."""
    file = folder / "keys.toml"
    file.write_text(keys_file(KEY))
    manifests = rendered(
        *("--values", str(VALUES / "mini.yaml")),
        *("--set-file", f"keys.file={file}"),
        *("--set-json", 'headSets.configMaps=[{"name": "own", "path": "mini/context"}]'),
        *("--set", f"port={free_port()},adminPort={free_port()},lameDuckSeconds={lame_duck}"),
    )
    dockerfile = DockerfileParser(fileobj=io.BytesIO((ROOT / "Dockerfile").read_bytes()))
    entrypoint = next(
        json.loads(step["value"])
        for step in dockerfile.structure
        if step["instruction"] == "ENTRYPOINT"
    )
    image_env = {
        name: value for name, value in dockerfile.envs.items() if name.startswith("JUICE_")
    }
    keys = the("Secret", manifests)["stringData"]
    head_set = ROOT / "head_sets" / "mini" / "context"
    container = Container(
        the("Deployment", manifests)["spec"]["template"]["spec"],
        entrypoint=entrypoint,
        image_env={**image_env, "JUICE_ENGINE": "own"},
        volumes={
            "keys": {name: text.encode() for name, text in keys.items()},
            "head-set-0": {each.name: each.read_bytes() for each in head_set.iterdir()},
        },
        folder=folder,
        service_env=service_variables(manifests) if with_service_links else None,
    )
    try:
        yield container
    finally:
        container.kill()


def status(container: Container, body: dict[str, Any] = SHORT, key: str | None = KEY) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(
        f"{container.url}/generate", json=body, headers=headers, timeout=60
    ).status_code


def test_it_starts_serves_and_leaves_as_kubernetes_asks(tmp_path: Path) -> None:
    """Probes, keys, head sets, lame duck, drain and exit, in the order of a pod's life."""
    with running(tmp_path, lame_duck=6, with_service_links=True) as container:
        within(60, lambda: container.probe("liveness"), "the process answers while it loads")
        container.start()
        assert container.probe("liveness")
        assert container.probe("readiness")

        assert status(container, key=None) == 401
        answer = httpx.post(
            f"{container.url}/generate", json={**SHORT, "steer": "context"}, headers=BEARER
        ).json()
        assert answer["steering"]["head_set"] == "context"
        assert answer["steering"]["applied"] is True
        # The ConfigMap's set is all there is: the sets of the image are not served beside it.
        assert status(container, {**SHORT, "steer": "parametric"}) in (400, 404, 422)
        assert httpx.get(f"{container.url}/metrics").status_code == 401
        admin = f"http://127.0.0.1:{container.ports['admin']}"
        assert "juice_requests_waiting 0" in httpx.get(f"{admin}/metrics").text
        assert httpx.post(f"{admin}/generate", json=SHORT, headers=BEARER).status_code == 404

        whole = httpx.post(f"{container.url}/generate", json=LONG, headers=BEARER, timeout=120)
        with ThreadPoolExecutor() as threads:
            killed_at = container.terminate()
            within(6, lambda: not container.probe("readiness"), "it is not ready any more")
            assert container.probe("liveness"), "or it would be killed"
            assert status(container) == 200, "a balancer has not noticed yet"
            # Taken just before the port closes, most of it is served while the server drains.
            late = [
                threads.submit(
                    httpx.post, f"{container.url}/generate", json=body, headers=BEARER, timeout=300
                )
                for body in [LONG] * 4
            ]

            def is_closed() -> bool:
                try:
                    httpx.get(f"{container.url}/healthz")
                except httpx.TransportError:
                    return True
                return False

            within(30, is_closed, "it takes nothing new")
            assert [each.result().json()["text"] for each in late] == [whole.json()["text"]] * 4
        assert container.process.wait(timeout=max(0, killed_at - time.monotonic())) == 0
        assert "Traceback" not in container.errors


@pytest.mark.parametrize("release", ["juice", "juice-admin"])
def test_the_variables_of_its_services_are_harmless(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JUICE_PORT and JUICE_ADMIN_PORT are names of settings, too."""
    variables = service_variables(rendered("--set", "keys.open=true", release=release))
    clash = "JUICE_PORT" if release == "juice" else "JUICE_ADMIN_PORT"
    assert variables[clash].startswith("tcp://")
    without = settings.read({})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert settings.read({}) == without
    assert settings.read({"port": 8123, "admin_port": 8124}).port == 8123
    monkeypatch.setenv(clash, "8125")
    assert settings.read({}) != without, "a number there is a setting"


def test_keys_that_change_in_the_secret_count_after_sighup(tmp_path: Path) -> None:
    with running(tmp_path) as container:
        container.start()
        write_volume(
            container.mounts["/etc/juice/keys"], {"keys.toml": keys_file("a-new-key").encode()}
        )
        assert status(container, key=KEY) == 200, "nothing was read yet"
        container.process.send_signal(signal.SIGHUP)
        within(10, lambda: status(container, key="a-new-key") == 200, "the new key counts")
        assert status(container, key=KEY) == 401
        container.terminate()
        assert container.process.wait(timeout=60) == 0


def test_a_head_set_that_changes_in_its_configmap_steers_without_a_restart(tmp_path: Path) -> None:
    changed = HeadSet.load(ROOT / "head_sets" / "mini" / "context").with_betas(
        "juice", Betas(plus=0.0, minus=-2.5)
    )
    with running(tmp_path) as container:
        container.start()

        def beta() -> float:
            answer = httpx.post(
                f"{container.url}/generate",
                json={**SHORT, "steer": "context"},
                headers=BEARER,
                timeout=60,
            ).json()
            assert answer["steering"]["applied"] is True
            return float(answer["steering"]["beta_minus"])

        assert beta() != -2.5
        write_volume(container.mounts["/head_sets/mini/context"], changed.to_files())
        within(30, lambda: beta() == -2.5, "the changed set steers")
        container.terminate()
        assert container.process.wait(timeout=60) == 0
