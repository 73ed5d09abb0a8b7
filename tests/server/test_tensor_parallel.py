"""A served model over two ranks: its answers, and how the server and its ranks end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx

import juice
from tests.support import tiny
from tests.support.serving import Server, serving


def test_a_served_model_is_sharded_and_ends_with_all_its_ranks(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "model", tiny.tiny_model("llama"))
    alone = juice.load(folder)
    made = alone.make_head_set(
        name="parametric",
        target="parametric",
        plus=[(0, 1), (3, 0)],
        minus=[(1, 3)],
        beta_plus=2,
        beta_minus=-1,
    )
    made.save(tmp_path / "head_sets" / "tiny" / "parametric")
    arguments = ("--model", str(folder), "--head-sets", str(tmp_path / "head_sets"), "--tp", "2")
    body = {
        "prompt": "The capital of France is",
        "max_tokens": 12,
        "ignore_eos": True,
        "steer": "parametric",
    }
    expected = alone.generate(
        body["prompt"], max_tokens=12, ignore_eos=True, steer="parametric", head_set=made
    )[0].text
    with serving(*arguments) as server:
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()
        assert answer["text"] == expected
        assert answer["steering"]["applied"] is True
        assert httpx.get(f"{server.url}/info").json()["model"]["tp"] == 2
        (other,) = children(server)
        # As from a supervisor that ends every process of a group: rank 0 decides.
        os.kill(other, signal.SIGTERM)
        assert (
            httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["text"] == expected
        )
    assert not Path(f"/proc/{other}").exists()


def test_a_killed_rank_ends_the_server_which_reports_the_rank(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path, tiny.tiny_model("llama"))
    server = Server("--model", str(folder), "--tp", "2")
    server.wait_until_ready()
    (other,) = children(server)
    os.kill(other, signal.SIGKILL)
    assert server.process.wait(60) == 1
    assert "juice: error: rank 1 ended with status -9" in server.errors()


def children(server: Server) -> list[int]:
    """Return the processes that any of a server's threads has started."""
    lists = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    return [int(pid) for own in lists for pid in own.read_text().split()]
