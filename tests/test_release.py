"""What is published: a wheel and a source archive, and what the wheel does once installed.

The dependencies come from the environment that runs the tests. `make release-test` sets
JUICE_TEST_RELEASE and installs them, too, into an environment that has nothing.
"""

from __future__ import annotations

import email
import json
import os
import re
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.support.serving import CONFLICT, Server

ROOT = Path(__file__).parents[1]
# Where the files of the wheel come from.
SOURCES = {"juice": "juice", "juice_server": "server/juice_server", "juice/_head_sets": "head_sets"}
NEEDED = {
    "juice/models/mini/model.safetensors",
    "juice/models/mini/tokenizer.json",
    "juice/models/mini/chat_template.jinja",
    "juice/models/mini/examples.jsonl",
    "juice/_head_sets/mini/parametric/head_set.json",
    "juice/_head_sets/mini/context/scores-ec23f2b3c0d6.safetensors",
    "juice/data/facts/wordings.toml",
    "juice/data/facts/world_capital.tsv",
    "juice/evaluation/data/report.html",
    "juice/identification/text/prose.txt",
    "juice/look.css",
    "juice/py.typed",
    "juice_server/playground/index.html",
    "juice_server/playground/main.js",
    "juice_server/py.typed",
}


def build(source: Path, target: Path, what: str) -> Path:
    """Build a wheel or a source archive, without a network, and return it."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", what, "-d", str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = target.iterdir()
    return built


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return `juice`, installed from the wheel into an environment of its own."""
    place = tmp_path_factory.mktemp("installed")
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    if os.environ.get("JUICE_TEST_RELEASE"):
        subprocess.run(
            [*pip, "--constraint", str(ROOT / "constraints.txt"), f"{wheel}[serve]"], check=True
        )
    else:
        asked = [python, "-c", "import site; print(site.getsitepackages()[0])"]
        packages = Path(subprocess.check_output(asked, text=True).strip())
        subprocess.run([*pip, "--no-deps", "--force-reinstall", str(wheel)], check=True)
        (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    return place / "bin" / "juice"


def elsewhere() -> dict[str, str]:
    """Return an environment in which nothing leads to the checkout."""
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_HUB_OFFLINE": "1",
    }


def test_the_wheel_has_the_packages_with_their_data_and_nothing_else(wheel: Path) -> None:
    listed = subprocess.check_output(["git", "ls-files", *SOURCES.values()], cwd=ROOT, text=True)
    expected = set()
    for name in listed.split():
        target, source = next(each for each in SOURCES.items() if name.startswith(f"{each[1]}/"))
        expected.add(target + name.removeprefix(source))
    found = {name for name in content(wheel) if ".dist-info/" not in name}
    assert found == expected
    assert found >= NEEDED


def test_its_page_links_to_nothing_that_is_not_there(wheel: Path) -> None:
    (metadata,) = (each for name, each in content(wheel).items() if name.endswith("/METADATA"))
    page = email.message_from_bytes(metadata).get_payload()
    links = re.findall(r"\]\(([^)]+)\)", str(page))
    base = "https://github.com/juice-steering/juice/blob/main/"
    files = "https://raw.githubusercontent.com/juice-steering/juice/main/docs/images/"
    assert all(link.startswith("https://") for link in links)
    assert f"{files}three-answers.svg" in links
    mine = [link.removeprefix(base) for link in links if link.startswith(base)]
    assert "docs/benchmarks.md" in mine
    assert all((ROOT / name).exists() for name in mine)


def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = build(ROOT, tmp_path / "sdist", "sdist")
    with tarfile.open(archive) as unpacked:
        unpacked.extractall(tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    folders = {each.name for each in source.iterdir() if each.is_dir()}
    assert folders == {"juice", "server", "head_sets"}
    assert content(build(source, tmp_path / "wheel", "wheel")) == content(wheel)


def test_the_installed_wheel_generates_on_the_bundled_model(program: Path, tmp_path: Path) -> None:
    where = [program.with_name("python"), "-c", "import juice; print(juice.__file__)"]
    found = subprocess.check_output(where, cwd=tmp_path, env=elsewhere(), text=True)
    assert Path(found.strip()).is_relative_to(program.parents[1])
    asked = [program, "generate", CONFLICT, "--steer", "parametric", "--max-tokens", "4", "--json"]
    done = subprocess.run(
        asked, cwd=tmp_path, env=elsewhere(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"].startswith(" Lima")


@pytest.mark.long
def test_the_installed_wheel_serves_the_bundled_model(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    server = Server(command=[str(program), "serve"], environment=elsewhere(), folder=tmp_path)
    try:
        server.wait_until_ready()
        asked = {"prompt": CONFLICT, "steer": "parametric", "max_tokens": 4}
        answer = httpx.post(f"{server.url}/generate", json=asked).json()
        assert answer["text"].startswith(" Lima")
        assert answer["steering"]["head_set"] == "parametric"
        assert "<title>" in httpx.get(f"{server.url}/").text
        assert httpx.get(f"{server.url}/docs").status_code == 200
    finally:
        assert server.stop() == 0
