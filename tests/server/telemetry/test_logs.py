"""What the server writes to standard error, in both forms."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import httpx

from tests.support.serving import CONFLICT, Server, serving

COMMAND = [sys.executable, "-m", "juice.cli.main", "serve"]


def test_every_line_is_json_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    options = ("--log-format", "json", "--head-sets", str(tmp_path))
    with serving(*options, command=COMMAND) as server:
        assert httpx.post(f"{server.url}/generate", json={"prompt": CONFLICT}).status_code == 200
    lines = [json.loads(line) for line in server.errors().splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    text = "\n".join(line["message"] for line in lines)
    assert "loading mini" in text
    assert f"ready on {server.url}" in text
    assert [line["route"] for line in lines if "route" in line] == ["/generate"], "probes are dull"


def test_a_start_that_fails_says_so_in_json_too(tmp_path: Path) -> None:
    server = Server("--log-format", "json", "--head-sets", str(tmp_path / "none"))
    assert server.process.wait(timeout=60) != 0
    lines = [json.loads(line) for line in server.errors().splitlines()]
    assert lines[-1]["level"] == "error"
    assert "none" in lines[-1]["message"]


def test_lines_are_to_be_read_otherwise() -> None:
    with serving() as server:
        body = {"prompt": CONFLICT, "steer": "context", "max_tokens": 2, "ignore_eos": True}
        headers = {"x-request-id": "mine"}
        httpx.post(f"{server.url}/generate", json=body, headers=headers)
    (line,) = [line for line in server.errors().splitlines() if "id=mine" in line]
    found = re.fullmatch(
        r"\d\d:\d\d:\d\d info: request id=mine method=POST route=/generate status=200"
        r" duration_s=[\d.]+ steer=context prompt_tokens=\d+ generated_tokens=2"
        r' finish_reasons=\["length"\]',
        line,
    )
    assert found, line
