"""What a kubelet does with a container of a rendered pod, for a process on this machine.

Its arguments, variables and probes are those of the manifest. Volumes are folders laid out as a
kubelet does it, with links that are swapped when a Secret changes; since a test cannot mount them
at the manifest's paths, the paths are replaced where they occur in arguments and variables.
"""

from __future__ import annotations

import os
import re
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from tests.support.forking import Forked

NUMBERS = count()


def write_volume(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files of a Secret or ConfigMap, so that all change at once."""
    folder.mkdir(parents=True, exist_ok=True)
    version = folder / f"..version_{next(NUMBERS)}"
    version.mkdir()
    for name, content in files.items():
        (version / name).write_bytes(content)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    new = folder / "..data_tmp"
    new.symlink_to(version.name)
    new.rename(folder / "..data")


class Container:
    """A running container of a pod.

    Args:
        pod: The spec of the pod.
        entrypoint: The image's.
        image_env: The image's variables; the pod's win over them.
        volumes: What is in each volume that comes from outside, by its name.
        folder: Where the volumes are made.
        service_env: Variables that Kubernetes sets for Services, which win over the image's.
    """

    def __init__(
        self,
        pod: dict[str, Any],
        *,
        entrypoint: list[str],
        image_env: dict[str, str],
        volumes: dict[str, dict[str, bytes]],
        folder: Path,
        service_env: dict[str, str] | None = None,
    ) -> None:
        (self.spec,) = pod["containers"]
        self.grace_s = float(pod["terminationGracePeriodSeconds"])
        self.ports = {port["name"]: port["containerPort"] for port in self.spec["ports"]}
        self.mounts: dict[str, Path] = {}
        for mount in self.spec["volumeMounts"]:
            place = folder / mount["mountPath"].lstrip("/")
            self.mounts[mount["mountPath"]] = place
            if mount["name"] in volumes:
                write_volume(place, volumes[mount["name"]])
            else:
                place.mkdir(parents=True, exist_ok=True)
        roots = {path.split("/")[1] for path in self.mounts}

        def placed(text: str) -> str:
            return re.sub(rf"(^|=)(?=/({'|'.join(roots)})(/|$))", rf"\g<1>{folder}", text)

        # Nothing of this machine's environment but what a process needs to start at all.
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        variables = {each["name"]: placed(each["value"]) for each in self.spec["env"]}
        environment = {"OMP_NUM_THREADS": "1", **image_env, **(service_env or {}), **variables}
        self.errors_path = folder / "errors"
        self.errors_path.touch()
        assert entrypoint[0] == "juice"
        self.process = Forked(
            (*entrypoint[1:], *map(placed, self.spec["args"])),
            output=Path(os.devnull),
            errors=self.errors_path,
            environment=environment | kept,
            folder=folder,
        )

    @property
    def url(self) -> str:
        """The address that the Service leads to."""
        return f"http://127.0.0.1:{self.ports['http']}"

    @property
    def errors(self) -> str:
        """What it wrote to standard error."""
        return self.errors_path.read_text()

    def probe(self, name: str) -> bool:
        """Return whether a probe of the manifest succeeds now, as a kubelet judges it."""
        wanted = self.spec[f"{name}Probe"]
        get = wanted["httpGet"]
        try:
            answer = httpx.get(
                f"http://127.0.0.1:{self.ports[get['port']]}{get['path']}",
                timeout=wanted["timeoutSeconds"],
            )
        except httpx.TransportError:
            return False
        return 200 <= answer.status_code < 400

    def start(self) -> None:
        """Wait until it has started, which the startup probe decides."""
        probe = self.spec["startupProbe"]
        deadline = time.monotonic() + probe["periodSeconds"] * probe["failureThreshold"]
        while not self.probe("startup"):
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < deadline, "the kubelet would have started it again"
            time.sleep(0.1)

    def terminate(self) -> float:
        """Send SIGTERM and return when the kubelet would send SIGKILL."""
        self.process.send_signal(signal.SIGTERM)
        return time.monotonic() + self.grace_s

    def kill(self) -> None:
        """End what is left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
