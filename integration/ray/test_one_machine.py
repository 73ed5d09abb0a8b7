"""`serve run` on one machine, as anybody tries it first: a model on each engine, both steered.

It takes no namespaces: continuous integration runs it, in the environment that has vLLM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
import yaml

from integration.ray.machines import BIN, ENVIRONMENT, ROOT, within
from integration.ray.traffic import PROMPT
from tests.support.serving import free_port

pytest.importorskip("vllm", reason="one of the models runs on vLLM")
ON_VLLM = {
    "engine": "vllm",
    "vllm_args": {
        "enforce_eager": True,
        "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    },
}


def config(port: int) -> dict[str, object]:
    """Return what is served: mini on our own engine and on vLLM."""
    models = {"own": {"settings": {"engine": "own"}}, "on-vllm": {"settings": ON_VLLM}}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "juice",
                "route_prefix": "/",
                "import_path": "juice_server.on_ray.application:application",
                "args": {
                    "settings": {
                        "model": "mini",
                        "kv_memory": "128MiB",
                        "api_keys": ["key"],
                        "drain": 1,
                    },
                    "models": models,
                },
                "deployments": [
                    {"name": name, "ray_actor_options": {"num_cpus": 0.2}} for name in models
                ],
            }
        ],
    }


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    (folder / "serve.yaml").write_text(yaml.safe_dump(config(port)))
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, BIN / "serve", "run", folder / "serve.yaml"],
            env={**os.environ, **ENVIRONMENT, "PATH": f"{BIN}:{os.environ['PATH']}"},
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with httpx.Client(
        base_url=f"http://127.0.0.1:{port}", headers={"authorization": "Bearer key"}, timeout=60
    ) as made:

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                return made.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        try:
            within(240, is_ready, "both models are ready", every_s=0.5)
            yield made
        finally:
            process.send_signal(signal.SIGINT)
            # How Ray ends is Ray's; on a busy machine it takes minutes.
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ask(client: httpx.Client, model: str, steer: str) -> dict[str, Any]:
    asked = {"model": model, "prompt": PROMPT, "steer": steer, "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_a_replica_on_either_engine_is_steered_and_says_the_same(client: httpx.Client) -> None:
    texts = {}
    for steer in ("none", "context", "parametric"):
        ours, on_vllm = (ask(client, model, steer) for model in ("own", "on-vllm"))
        texts[steer] = ours["choices"][0]["text"]
        assert on_vllm["choices"][0]["text"] == texts[steer]
        for answer in (ours, on_vllm):
            assert answer["steering"]["applied"] is (steer != "none")
    assert "Lima" in texts["parametric"]
    assert "Lima" not in texts["context"]


def test_a_stream_arrives_in_parts_and_ends_whole(client: httpx.Client) -> None:
    body = {"model": "on-vllm", "prompt": PROMPT, "max_tokens": 8, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        events = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert len(events) > 4
    assert events[-1] == "data: [DONE]"


def test_what_cannot_be_served_is_refused_as_by_one_server(client: httpx.Client) -> None:
    unknown = client.post("/v1/completions", json={"model": "other", "prompt": PROMPT})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    without_key = client.post("/generate", json={"prompt": PROMPT}, headers={"authorization": ""})
    assert without_key.status_code == 401
    assert {"own", "on-vllm"} < {each["id"] for each in client.get("/v1/models").json()["data"]}


@pytest.mark.long
def test_a_killed_replica_leaves_nothing_of_vllm_behind_and_starts_again(
    client: httpx.Client,
) -> None:
    (core,) = (
        each
        for each in psutil.process_iter(["name"])
        if "EngineCore" in each.info["name"] and each.parent().name().startswith("ray::")
    )
    processes = [core, *core.children(recursive=True)]
    core.parent().kill()
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not left

    def answers() -> bool:
        body = {"model": "on-vllm", "prompt": PROMPT, "max_tokens": 1}
        return client.post("/v1/completions", json=body).status_code == 200

    within(180, answers, "another replica has taken its place", every_s=1)
