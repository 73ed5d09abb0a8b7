"""GuideLLM: a short load run on the completions and the chat route; steered by a name."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.clients import questions
from integration.clients.conftest import ROOT
from integration.clients.judging import steers
from tests.support.serving import Server

if importlib.util.find_spec("guidellm") is None:
    pytest.skip("GuideLLM needs PyTorch; make clients-load installs both", allow_module_level=True)

PACKAGES = ("guidellm",)
N_REQUESTS, N_TOKENS = 40, 8
ROUTES = {
    "/v1/completions": (questions.PROMPT, questions.PROMPTS),
    "/v1/chat/completions": (questions.QUESTION, questions.ANSWERS),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("steer", questions.STEERS)
def test_a_load_run_has_every_answer(
    server: Server, tmp_path: Path, steer: str, route: str
) -> None:
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompt, answers = ROUTES[route]
    line = json.dumps({"prompt": prompt, "output_tokens_count": N_TOKENS})
    prompts.write_text(f"{line}\n" * N_REQUESTS)
    model = questions.MODEL if steer == "none" else f"{questions.MODEL}:{steer}"
    backend: dict[str, Any] = {"kind": "openai_http", "target": server.url, "model": model}
    backend |= {"request_format": route, "extras": {"body": {"temperature": 0}}}
    with steers(server, route, N_REQUESTS) as seen:
        done = subprocess.run(
            [
                *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"),
                *("--backend", json.dumps(backend)),
                *("--profile", "kind=concurrent,streams=8"),
                *("--constraint", f"kind=max_requests,count={N_REQUESTS}"),
                *("--tokenizer", "kind=huggingface_auto,model=juice/models/mini"),
                *("--data", f"kind=json_file,path={prompts}"),
                *("--output", f"kind=json,path={report}"),
            ],
            cwd=ROOT,
            env=dict(os.environ),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert seen == [steer] * N_REQUESTS
    requests: dict[str, list[Any]] = benchmark["requests"]
    assert [len(requests[kind]) for kind in ("successful", "errored", "incomplete")] == [
        N_REQUESTS,
        0,
        0,
    ]
    # Its requests ignore the end of the answer, so that each has as many tokens as were asked for.
    assert all(each["output"].startswith(answers[steer]) for each in requests["successful"])
