"""Streams hold no line end but their own, whatever an answer says: clients split at Unicode's."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import httpx
import pytest

ODD = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\r\nh"
ASKED: dict[str, Any] = {"max_tokens": 60, "stream": True, "guided_choice": [ODD]}
TURNS = [{"role": "user", "content": "x"}]
DOORS: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "x", **ASKED},
    "/v1/completions": {"model": "mini", "prompt": "x", **ASKED},
    "/v1/chat/completions": {"model": "mini", "messages": TURNS, **ASKED},
    "/v1/messages": {"model": "mini", "messages": TURNS, **ASKED},
    "/v1/responses": {
        "model": "mini",
        "input": "x",
        **{("max_output_tokens" if k == "max_tokens" else k): v for k, v in ASKED.items()},
    },
    "/compare": {"prompt": "x", **ASKED},
}
NODE = """
const [url, body] = process.argv.slice(1);
const sent = { method: "POST", body, headers: { "content-type": "application/json" } };
const answer = await fetch(url, sent);
const { Readable } = await import("node:stream");
const { createInterface } = await import("node:readline");
for await (const line of createInterface({ input: Readable.fromWeb(answer.body) }))
  if (line) console.log(JSON.stringify(line));
"""


def texts_of(lines: list[str]) -> list[str]:
    """Return what the answers of a stream say, whatever the protocol; each line is whole JSON."""
    said: dict[Any, str] = {}
    for line in lines:
        kind, _, data = line.partition(": ")
        assert kind in ("data", "event"), line
        if kind == "data" and data != "[DONE]":
            event = json.loads(data)
            choices = event.get("choices") or [event]
            delta = choices[0].get("delta", choices[0].get("text", ""))
            for name in ("content", "text"):
                delta = (
                    (delta.get(name) or "") if isinstance(delta, dict) and name in delta else delta
                )
            answer = event.get("target")
            said[answer] = said.get(answer, "") + (delta if isinstance(delta, str) else "")
    return [text for text in said.values() if text]


@pytest.mark.parametrize("door", DOORS)
def test_httpx_reads_whole_events(url: str, door: str) -> None:
    with httpx.stream("POST", url + door, json=DOORS[door], timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200, lines
    texts = texts_of(lines)
    assert texts
    assert all(ODD in text for text in texts)


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js here")
@pytest.mark.parametrize("door", DOORS)
def test_node_reads_whole_events(url: str, door: str) -> None:
    done = subprocess.run(
        ["node", "--input-type=module", "-e", NODE, url + door, json.dumps(DOORS[door])],
        capture_output=True,
        text=True,
        check=True,
    )
    texts = texts_of([json.loads(line) for line in done.stdout.splitlines()])
    assert texts
    assert all(ODD in text for text in texts)
