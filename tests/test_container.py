"""The Dockerfile without Docker: its install and start commands, in a folder with what it copies.

The dependencies come from the environment that runs the tests, so that only the project itself is
built and installed. `make container-test` builds and runs images; nothing covers the GPU.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import site
import subprocess
import sys
import venv
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest
from dockerfile_parse import DockerfileParser

from tests.support.serving import CONFLICT, Server, free_port

ROOT = Path(__file__).parents[1]


def instructions() -> list[tuple[str, str]]:
    parser = DockerfileParser(fileobj=io.BytesIO((ROOT / "Dockerfile").read_bytes()))
    return [(step["instruction"], step["value"]) for step in parser.structure]


def is_sent(name: str) -> bool:
    """Return whether .dockerignore lets a top-level name into the build."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().split():
        if fnmatch(name, line.lstrip("!").removeprefix("**/")):
            sent = line.startswith("!")
    return sent


def test_the_image_is_pinned_unprivileged_and_checked() -> None:
    steps = instructions()
    bases = [value for name, value in steps if name == "ARG" and value.startswith("BASE=")]
    assert bases == ["BASE=nvidia/cuda:13.0.1-base-ubuntu24.04"], "an exact tag"
    assert [value for name, value in steps if name == "USER"] == ["10001"]
    assert [json.loads(value) for name, value in steps if name == "ENTRYPOINT"] == [
        ["juice", "serve"]
    ]
    assert [json.loads(value) for name, value in steps if name == "VOLUME"] == [
        ["/models", "/head_sets"]
    ]
    assert [value for name, value in steps if name == "STOPSIGNAL"] == ["SIGTERM"]
    assert sum(name == "FROM" for name, _ in steps) == 2
    variables = [value for name, value in steps if name == "ENV"]
    assert "VLLM_USE_FLASHINFER_SAMPLER=0" in variables, "the base image has no nvcc to compile it"
    check = next(value for name, value in steps if name == "HEALTHCHECK")
    assert "/readyz" in check
    assert "JUICE_ADMIN_PORT" in check, "it needs no key there, and is not in the way of clients"


def test_the_classic_builder_can_build_it() -> None:
    assert not (ROOT / "Dockerfile").read_text().startswith("# syntax"), "it would be pulled"
    assert "--mount" not in (ROOT / "Dockerfile").read_text()


@pytest.mark.long
def test_its_install_and_start_commands_serve(tmp_path: Path) -> None:
    source, installed = tmp_path / "src", tmp_path / "opt"
    source.mkdir()
    for name, value in instructions():
        if name == "COPY" and not value.startswith("--from"):
            *names, target = value.split()
            for copied in names:
                assert is_sent(copied), f"{copied} is copied, but .dockerignore keeps it out"
                place = source / (copied if target == "./" else target)
                if (ROOT / copied).is_dir():
                    shutil.copytree(
                        ROOT / copied, place, ignore=shutil.ignore_patterns("__pycache__")
                    )
                else:
                    shutil.copy(ROOT / copied, place)
    venv.create(installed, with_pip=True)
    asked = [installed / "bin/python", "-c", "import site; print(site.getsitepackages()[0])"]
    packages = Path(subprocess.check_output(asked, text=True).strip())
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    installs = [
        value
        for name, value in instructions()
        if name == "RUN" and "pip install" in value and "TORCH_INDEX" not in value
    ]
    assert len(installs) == 1
    # The dependencies are those of the tests; juice itself must be the one built here.
    command = installs[0].replace("pip install", "pip install --force-reinstall --no-deps")
    subprocess.run(
        ["sh", "-c", command.replace("/opt/juice", str(installed))],
        env={**os.environ, "ENGINE": "own"},
        cwd=source,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    shutil.rmtree(source)

    home = tmp_path / "home"
    home.mkdir()
    variables = dict(
        part.split("=", 1)
        for name, value in instructions()
        if name == "ENV"
        for part in shlex.split(value)
    )
    admin_port = str(free_port())
    environment = {
        "JUICE_HOST": variables["JUICE_HOST"],
        "JUICE_ADMIN_PORT": admin_port,
        "PATH": f"{installed / 'bin'}:{os.environ['PATH']}",
    }
    entry_point = next(json.loads(value) for name, value in instructions() if name == "ENTRYPOINT")
    server = Server(
        command=[str(installed / "bin" / entry_point[0]), *entry_point[1:]],
        environment=environment,
        folder=home,
    )
    try:
        server.wait_until_ready()
        where = f"import juice, sys; sys.exit(not juice.__file__.startswith({str(installed)!r}))"
        assert (
            subprocess.run(
                [installed / "bin/python", "-c", where], cwd=home, check=False
            ).returncode
            == 0
        )
        answer = httpx.post(
            f"{server.url}/generate",
            json={"prompt": CONFLICT, "steer": "parametric", "max_tokens": 4},
        ).json()
        assert answer["text"].startswith(" Lima")
        assert answer["steering"]["head_set"] == "parametric"
        check = next(value for name, value in instructions() if name == "HEALTHCHECK")
        probe = json.loads(check[check.index("CMD") + 3 :])
        each = {**os.environ, "JUICE_ADMIN_PORT": admin_port}
        assert subprocess.run(probe, env=each, check=False, timeout=30).returncode == 0
        assert (
            subprocess.run(
                probe,
                env={**each, "JUICE_ADMIN_PORT": "1"},
                check=False,
                timeout=30,
                capture_output=True,
            ).returncode
            != 0
        )
    finally:
        assert server.stop() == 0


@pytest.mark.skipif(
    sys.platform != "linux", reason="hadolint's package has binaries for Linux only"
)
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "hadolint", "Dockerfile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
