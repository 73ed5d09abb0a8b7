"""The architecture: what carries a request, and through how many files of ours it goes."""

from __future__ import annotations

import json
import re

from tests.support.commands import juice
from tests.support.page_blocks import ROOT

PAGE = ROOT / "docs" / "architecture.md"
# A steered POST /generate in this process, the second one: which files execute a line for it?
TRACED = """
import asyncio, json, sys, threading
root, seen, is_on = sys.argv[1], set(), [False]
def trace(frame, event, argument):
    file = frame.f_code.co_filename
    if not file.startswith((root + "/juice/", root + "/server/")):
        return None
    if is_on[0]:
        seen.add(file.removeprefix(root + "/"))
    return trace
threading.settrace(trace)
sys.settrace(trace)
import httpx
from juice_server.app import create
from juice_server.settings import Settings
async def run():
    app = create(Settings(model="mini", head_sets="head_sets"))
    body = {"prompt": "The capital of Peru is", "context": "The capital of Peru is Cairo.",
            "steer": "context", "max_tokens": 4}
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            while (await client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.1)
            await client.post("/generate", json=body)
            is_on[0] = True
            answer = await client.post("/generate", json=body)
            is_on[0] = False
    print(json.dumps([answer.json()["steering"]["applied"], sorted(seen)]))
asyncio.run(run())
"""


def test_the_types_that_carry_a_request_are_there_and_no_more_than_twelve() -> None:
    listed = re.search(r"So twelve types carry it: (.+?)\. Lines", PAGE.read_text(), re.DOTALL)
    assert listed is not None
    names = re.findall(r"`(\w+)`", listed[1])
    assert len(names) == len(set(names)) == 12
    code = "\n".join(
        file.read_text() for room in ("juice", "server") for file in (ROOT / room).rglob("*.py")
    )
    assert [name for name in names if not re.search(rf"(?m)^class {name}\b", code)] == []


def test_a_steered_request_goes_through_few_files_of_ours() -> None:
    """Kills: another layer between the route and the hook that only passes on."""
    done = juice(str(ROOT), program=TRACED, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    is_applied, files = json.loads(done.stdout)
    assert is_applied
    assert "juice/model/steering_hooks.py" in files
    assert len(files) <= 36, files
