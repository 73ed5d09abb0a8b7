"""The mistakes that end the server at startup, each with one line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from juice.head_set import HeadSet
from tests.support.serving import Server


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_line(tmp_path: Path) -> None:
    server = Server("--model", str(tmp_path))
    assert server.process.wait(timeout=120) == 2
    assert "juice: error: the folder" in server.errors()
    assert "Traceback" not in server.errors()


def test_a_head_sets_folder_that_is_wrong_ends_the_server_with_one_line(tmp_path: Path) -> None:
    for folder, message in (
        (tmp_path / "nowhere", "does not exist"),
        (Path("head_sets/mini"), "give the folder above"),
    ):
        server = Server("--head-sets", str(folder))
        assert server.process.wait(timeout=120) == 2
        assert message in server.errors()


def test_a_default_steer_without_a_head_set_ends_the_server_with_one_line(tmp_path: Path) -> None:
    server = Server("--head-sets", str(tmp_path), "--default-steer", "context")
    assert server.process.wait(timeout=120) == 2
    assert "default_steer is context, but no head set" in server.errors()


def test_a_default_gate_needs_sets_that_have_one(tmp_path: Path) -> None:
    for target in ("context", "parametric"):
        own = HeadSet.load(Path("head_sets/mini") / target)
        own = own.with_gate("juice", None) if target == "context" else own
        own.save(tmp_path / "mini" / target)
    server = Server("--head-sets", str(tmp_path), "--default-gate", "auto")
    assert server.process.wait(timeout=120) == 2
    assert "default_gate is auto, but context in" in server.errors()
    assert "Traceback" not in server.errors()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-batch", "0"), "JUICE_MAX_BATCH"),
        (("--kv-memory", "much"), "JUICE_KV_MEMORY"),
        (("--api-keys-file", "/nowhere"), "/nowhere"),
        (("--default-steer", "truth"), "--default-steer"),
        (("--max-model-len", "1025"), "context of 1024"),
    ],
)
def test_a_wrong_setting_ends_the_server_with_one_line(
    arguments: tuple[str, ...], message: str
) -> None:
    server = Server(*arguments)
    assert server.process.wait(timeout=120) == 2
    assert message in server.errors()
    assert "Traceback" not in server.errors()


def test_a_port_that_is_taken_ends_the_server_with_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "juice.cli.main", "serve", "--port", str(port)]
        done = subprocess.run(
            command, env=dict(os.environ), capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 2
    assert "already in use" in done.stderr.lower()
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
