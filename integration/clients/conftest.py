"""A running server, and the record of what passed with which version of a client."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import Server, serving

ROOT = Path(__file__).parents[2]
# The server's own environment: clients have none of its packages to share by accident.
JUICE = ROOT / ".venv" / "bin" / "juice"
PASSED = pytest.StashKey[dict[str, Counter[str]]]()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with serving(
        "--log-format",
        "json",
        command=[str(JUICE), "serve"],
        environment={"OMP_NUM_THREADS": "1"},
        folder=ROOT,
    ) as running:
        yield running


@pytest.fixture(scope="session")
def url(server: Server) -> str:
    return server.url


@pytest.fixture(scope="session", autouse=True)
def offline() -> None:
    """Keep the clients from what they would fetch or send by themselves."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        LANGSMITH_TRACING="false",
        TOKENIZERS_PARALLELISM="false",
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run write what passed."""
    parser.addoption("--write-results", type=Path, help="write what passed to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PASSED] = defaultdict(Counter)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Any:
    report = yield
    packages = getattr(item.module, "PACKAGES", None)
    if packages and report.when == "call" and report.passed:
        client = ", ".join(f"{name} {found_version(name)}" for name in packages)
        item.config.stash[PASSED][client].update([item.originalname.removeprefix("test_")])
    return report


def found_version(name: str) -> str:
    """Return the version of a client; those of npm stand in the lock file."""
    if name.endswith("(npm)"):
        lock = json.loads((Path(__file__).parent / "node" / "package-lock.json").read_text())
        return str(lock["packages"][f"node_modules/{name.split()[0]}"]["version"])
    return version(name)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write how many cases of each test passed, if the option asks for it and nothing failed."""
    path: Path | None = session.config.getoption("--write-results")
    if path and exitstatus == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(session.config.stash[PASSED], indent=1, sort_keys=True) + "\n")
