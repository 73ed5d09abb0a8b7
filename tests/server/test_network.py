"""With the network cut every route answers, nothing is sent, and no prompt is in the log.

Kills: a version check, a counter of users, a page that loads its scripts from elsewhere by way of
the server, a library that asks the hub although the model is here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from juice_server.app import create
from juice_server.settings import Settings
from tests.support.every_route import BODIES, path_of, routes_of

ROOT = Path(__file__).parents[2]
# As root, or as whoever may be root in a namespace of their own.
WAYS = (["unshare", "--net", "--mount"], ["unshare", "--map-root-user", "--net", "--mount"])


def cut_off() -> list[str]:
    """Return the command that runs another one in a network of its own."""
    for way in WAYS:
        try:
            make = [*way, "ip", "link", "add", "one", "type", "veth", "peer", "name", "other"]
            subprocess.run(make, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return way
    pytest.skip("a network namespace takes root, or user namespaces, and iproute2")


def test_without_a_network_every_route_answers_and_nothing_is_sent() -> None:
    command = [*cut_off(), sys.executable, "-m", "tests.support.cut_off"]
    requests = [
        (method, path_of(path), BODIES.get((method, path)))
        for method, path in sorted(set(routes_of(create(Settings()))))
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["statuses"]) > 36
    assert {*found["statuses"].values()} == {200}, found["statuses"]
    assert found["engine"] == os.environ.get("JUICE_ENGINE", "own")
    assert found["code"] == 0
    assert "Traceback" not in found["log"]
    assert "What is the capital" not in found["log"], "prompts are nobody else's business"
    assert found["tried"]["connection"] > 0, "or nothing would be seen"
    assert found["tried"]["name"] > 0
    assert found["sent"] == 0
