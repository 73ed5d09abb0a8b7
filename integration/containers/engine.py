"""A Docker engine of the tests' own, apart from one that runs already.

It needs no image from a registry, no firewall rules and no default bridge: builds use the host's
network, and containers a network that is made for them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAMS = {"dockerd": "docker.io", "docker": "docker.io", "debootstrap": "debootstrap"}
STORAGE = ("overlay2", "vfs")  # vfs copies every layer: slow and large, but it works everywhere


class NoEngineError(Exception):
    """Why no engine can be had here."""


class Engine:
    """`dockerd` with its images in a folder, and the `docker` that talks to it."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0:
            raise NoEngineError("dockerd and debootstrap need root")
        if missing := sorted({PROGRAMS[name] for name in PROGRAMS if shutil.which(name) is None}):
            raise NoEngineError(f"missing here: apt-get install {' '.join(missing)}")
        folder.mkdir(exist_ok=True)
        self._folder = folder
        # The builder that Docker had first: it needs no plugin and no image from a registry.
        self.environment = {
            **os.environ,
            "DOCKER_HOST": f"unix://{folder}/docker.sock",
            "DOCKER_BUILDKIT": "0",
        }
        for self.storage in STORAGE:
            if self._start():
                break
        else:
            raise NoEngineError(f"dockerd does not start: {self._last_words()}")
        self.network = "juice"
        self.docker("network", "create", self.network)

    def _start(self) -> bool:
        folder = self._folder
        command = [
            "dockerd",
            "--iptables=false",
            "--bridge=none",
            f"--storage-driver={self.storage}",
            f"--data-root={folder}/data",
            f"--exec-root={folder}/exec",
            f"--pidfile={folder}/dockerd.pid",
            f"--host={self.environment['DOCKER_HOST']}",
        ]
        with (folder / "dockerd.log").open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < deadline:
            if subprocess.run(
                ["docker", "info"], env=self.environment, capture_output=True, check=False
            ).stdout.count(b"Storage Driver"):
                return True
            time.sleep(0.2)
        self._end()
        return False

    def _last_words(self) -> str:
        return (self._folder / "dockerd.log").read_text().strip().splitlines()[-1]

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # The engine leaves the names of its network behind.
        for line in Path("/proc/mounts").read_text().splitlines():
            if (place := line.split()[1]).startswith(f"{self._folder}/"):
                subprocess.run(["umount", place], check=True)

    def stop(self) -> None:
        """Remove the containers and the network, and end the engine."""
        if left := self.docker("ps", "--all", "--quiet").split():
            self.docker("rm", "--force", "--volumes", *left)
        self.docker("network", "prune", "--force")
        self._end()

    def docker(self, *arguments: str, timeout: float = 120) -> str:
        """Return what a command of Docker writes; fail with its errors."""
        return self.run(["docker", *arguments], timeout=timeout)

    def run(self, command: list[str], *, timeout: float, **variables: str) -> str:
        """Return what any command that talks to this engine writes; fail with its errors."""
        done = subprocess.run(
            command,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        if done.returncode != 0:
            said = f"{done.stdout}\n{done.stderr}".strip().splitlines()
            raise AssertionError(f"{' '.join(command)}:\n" + "\n".join(said[-30:]))
        return done.stdout.strip()

    def inspect(self, name: str) -> dict[str, Any]:
        """Return what the engine knows about a container or an image."""
        found: dict[str, Any] = json.loads(self.docker("inspect", name))[0]
        return found

    def build(self, tag: str, folder: Path, **arguments: str) -> None:
        """Build the Dockerfile of a folder, with these build arguments."""
        given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        self.docker("build", "--network=host", f"--tag={tag}", *given, str(folder), timeout=3600)
