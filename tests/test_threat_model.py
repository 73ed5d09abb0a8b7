"""What SECURITY.md says of the code and of what it is built on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
# The last version of each package with an advisory that concerns JuICE, and the advisory.
ADVISORIES = [
    ("torch", "2.9.1", "CVE-2026-24747"),
    ("torch", "2.5.1", "CVE-2025-32434"),
    ("transformers", "5.2.0", "CVE-2026-4372"),
    ("starlette", "1.0.0", "CVE-2026-48710"),
    ("starlette", "0.49.0", "CVE-2025-62727"),
    ("starlette", "0.39.2", "CVE-2024-47874"),
    ("h11", "0.14.0", "CVE-2025-43859"),
    ("jinja2", "3.1.5", "CVE-2025-27516"),
    ("jinja2", "3.1.4", "CVE-2024-56326"),
]
# A flag wherever it is given, as an argument or in a dictionary; and what ruff has no rule for.
UNSAFE = re.compile(
    r"""\b(trust_remote_code|shell)["']?\s*[:=](?!\s*False\b)|(?<![.\w])(compile|__import__)\("""
)


def test_no_code_of_a_model_runs() -> None:
    """Ruff finds the rest: what unpickles or evaluates is banned in pyproject.toml."""
    sources = [*ROOT.glob("juice/**/*.py"), *ROOT.glob("server/**/*.py")]
    assert len(sources) > 100
    assert [str(path) for path in sources if UNSAFE.search(path.read_text())] == []


@pytest.mark.parametrize(
    "code",
    [
        "f(trust_remote_code=True)",
        "f(**{'trust_remote_code': flag})",
        'f(**{"shell": flag})',
        "__import__(name)",
        "compile(text, name, mode)",
    ],
)
def test_the_search_finds_what_could_run_code(code: str) -> None:
    assert UNSAFE.search(code)


def requirements() -> dict[str, list[Requirement]]:
    """Return what the project requires, the core and every extra, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    found: dict[str, list[Requirement]] = {}
    for text in (*project["dependencies"], *(each for extra in extras for each in extra)):
        one = Requirement(text)
        found.setdefault(one.name.lower(), []).append(one)
    return found


@pytest.mark.parametrize(("name", "last", "advisory"), ADVISORIES)
def test_versions_with_a_known_hole_are_not_accepted(name: str, last: str, advisory: str) -> None:
    for one in requirements()[name]:
        assert not one.specifier.contains(last), one
    assert advisory in (ROOT / "pyproject.toml").read_text(), "the floor has its reason beside it"


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-vllm.txt"])
def test_what_is_pinned_is_what_is_required(file: str) -> None:
    pins = dict(
        line.lower().split("==") for line in (ROOT / file).read_text().splitlines() if "==" in line
    )
    for name, requirement in requirements().items():
        for one in requirement if name in pins else []:
            assert one.specifier.contains(pins[name], prereleases=True), (one, pins[name])


@pytest.mark.long
def test_the_list_of_what_is_installed_is_valid_and_whole(tmp_path: Path) -> None:
    target = tmp_path / "sbom.json"
    made = subprocess.run(
        ["make", "-s", "sbom", f"SBOM={target}", f"SBOM_OF={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    document = json.loads(target.read_text())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["component"]["name"] == "juice-steering"
    listed = {
        re.sub(r"[-_.]+", "-", component["name"].lower()): component
        for component in document["components"]
    }
    for name in ("torch", "transformers", "starlette", "h11", "jinja2", "safetensors"):
        assert listed[name]["version"].partition("+")[0] == version(name).partition("+")[0]
        assert listed[name]["purl"].startswith(f"pkg:pypi/{name}@")
    assert len(listed) > 50
