"""`vllm serve` with the plugin: OpenAI's client steers, and what would go wrong is refused."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import juice
from juice.engine.vllm.plugin import PlainVllm
from juice_server.vllm import Steering
from tests.support.on_vllm import save_with_set
from tests.support.serving import free_port

PROMPT = "The capital of France is the city of Paris, and it has been for many years. It is"
MODEL = ("--model-impl", "transformers")
SCHEDULER = ("--scheduler-cls", "juice_server.vllm.scheduler")
PROCESSOR = ("--logits-processors", "juice_server.vllm:RowWriter")
MIDDLEWARE = ("--middleware", "juice_server.vllm.Steering")
KEY = "secret"
GUARD = ("--api-key", KEY)
AS_CLIENT = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
TINY = (
    *("--dtype", "float32", "--max-model-len", "128", "--block-size", "32"),
    *("--kv-cache-memory-bytes", "33554432", "--max-num-seqs", "4", "--enforce-eager"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    save_with_set(root, "context")
    return root


@contextmanager
def vllm_serve(folder: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run on the model what `vllm serve` runs; vLLM's build for CPUs lacks that command itself."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folder / "model")),
        *("--port", str(port), *TINY, *arguments),
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A test before this one may have shortened this process's vLLM log.
            env={
                **os.environ,
                "VLLM_LOGGING_LEVEL": "INFO",
                "JUICE_HEAD_SETS": str(folder / "head_sets"),
            },
        )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 180
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError("vllm serve did not become ready")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with vllm_serve(folder, *MODEL, *SCHEDULER, *PROCESSOR, *MIDDLEWARE, *GUARD) as (url, process):
        wait_until_ready(url, process)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        # What is saved after the start is not what the workers were started for.
        saved, other = folder / "head_sets", folder / "other"
        shutil.copytree(saved, folder / "kept")
        with juice.load(folder / "model") as model:
            made = model.make_head_set(name="context", target="context", plus=[(2, 2)], beta_plus=9)
        made.save(saved / "tiny" / "context", overwrite=True)
        complete(client, steer="context")
        saved.rename(other)
        (folder / "kept").rename(saved)
        with client:
            yield client


def complete(client: openai.OpenAI, **extra: object) -> list[int]:
    answer = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=PROMPT,
        temperature=0,
        max_tokens=12,
        extra_body={"ignore_eos": True, "return_token_ids": True, **extra},
    )
    return list(answer.choices[0].token_ids)


@pytest.mark.usefixtures("client")
def test_the_start_says_that_steering_is_not_checked(folder: Path) -> None:
    assert "juice doctor --engine vllm" in (folder / "log").read_text()


def test_each_request_is_steered_as_it_asks_though_all_share_a_prefix(
    client: openai.OpenAI, folder: Path
) -> None:
    asked = {
        "plain": {},
        "named": {"steer": "context"},
        "weaker": {"steer": {"target": "context", "strength": 0.5}},
        "once": {"steer": {"target": "context", "method": "june", "beta_plus": 3}},
    }
    with juice.load(folder / "model", head_sets=folder / "head_sets") as model:
        expected = {
            "plain": model.generate(PROMPT, max_tokens=12, ignore_eos=True),
            "named": model.generate(PROMPT, max_tokens=12, ignore_eos=True, steer="context"),
            "weaker": model.generate(
                PROMPT, max_tokens=12, ignore_eos=True, steer="context", strength=0.5
            ),
            "once": model.generate(
                PROMPT,
                max_tokens=12,
                ignore_eos=True,
                steer=juice.Steer(target="context", method="june", beta_plus=3, beta_minus=-1),
            ),
        }
    asked["once"]["steer"]["beta_minus"] = -1
    assert len({one[0].token_ids for one in expected.values()}) == 4
    for _ in range(2):
        for name, extra in asked.items():
            assert complete(client, **extra) == list(expected[name][0].token_ids), name


def test_xargs_steer_too(client: openai.OpenAI) -> None:
    half = {"target": "context", "strength": 0.5}
    by_body = complete(client, steer=half)
    for written in (half, json.dumps(half)):
        assert complete(client, vllm_xargs={"steer": written}) == by_body
    assert complete(client, vllm_xargs={"steer": "context"}) == complete(client, steer="context")


@pytest.mark.parametrize(
    ("extra", "status", "reason"),
    [
        ({"steer": "contxt"}, 400, "'context', 'parametric' or 'none'"),
        ({"steer": {"target": "context", "strength": -1}}, 400, "strength"),
        ({"steer": "parametric"}, 404, "no head set 'parametric'"),
        ({"steer": {"target": "context", "method": "cad"}}, 400, "methods cad"),
        ({"steer": {"target": "parametric", "method": "grd"}}, 400, "methods cad.*grd"),
        ({"vllm_xargs": {"juice": "{}"}}, 400, "send steer"),
        ({"vllm_xargs": {"steer": "{"}}, 400, "not JSON"),
        pytest.param({"steer": '{"a":' * 9999}, 400, "not JSON", id="text nested deeply"),
        ({"sampling_params": {"extra_args": {"juice": "{}"}}}, 400, "extra_args .* send steer"),
        ({"steer": "context", "use_beam_search": True}, 400, "beam search"),
    ],
)
def test_what_cannot_be_steered_is_refused(
    client: openai.OpenAI, extra: dict[str, object], status: int, reason: str
) -> None:
    with pytest.raises(openai.APIStatusError, match=reason) as caught:
        complete(client, **extra)
    assert caught.value.status_code == status


def test_a_body_that_is_nested_too_deeply_is_refused(client: openai.OpenAI) -> None:
    body = f'{{"steer": "context", "prompt": {"[" * 9999}'
    refused = httpx.post(f"{client.base_url}completions", content=body, headers=AS_CLIENT)
    assert refused.status_code == 400
    assert "send a flatter one" in refused.text


def test_a_route_that_would_not_steer_is_refused(client: openai.OpenAI) -> None:
    """Kills: 200 for an answer that nobody steered."""
    url = str(client.base_url).replace("/v1/", "")
    body = {"model": client.models.list().data[0].id, "prompt": PROMPT}
    refused = httpx.post(f"{url}/tokenize", json={**body, "steer": "context"})
    assert refused.status_code == 400
    assert "/tokenize takes no steering; expected one of /v1/completions" in refused.text
    unsteered = httpx.post(f"{url}/tokenize", json={**body, "steer": "none"})
    assert unsteered.status_code == 200


def test_a_body_is_not_read_before_its_sender_is_known(client: openai.OpenAI) -> None:
    """Kills: memory for whatever anybody sends."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port), 10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(12) == b"HTTP/1.1 401"


def test_a_model_that_could_not_be_read_is_no_fault_of_the_body_and_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills: 400 for every request after one moment without the disk."""
    app, failures = FastAPI(), [OSError("no disk at the start"), OSError("nor a moment later")]
    app.state.vllm_config = None

    @app.post("/v1/completions")
    async def echo(body: dict[str, Any]) -> dict[str, Any]:
        return body

    def read(_: object) -> SimpleNamespace:
        if failures:
            raise failures.pop()
        return SimpleNamespace(extra_args=lambda _: {"juice": "coefficients"})

    app.add_middleware(Steering)
    monkeypatch.setattr(PlainVllm, "of", read)
    with TestClient(app) as client:
        first, second = (client.post("/v1/completions", json={"steer": "context"}) for _ in "12")
    assert first.status_code == 500, first.text
    assert second.json() == {"vllm_xargs": {"juice": "coefficients"}}


@pytest.mark.long
def test_without_the_middleware_what_asks_for_steering_is_refused(folder: Path) -> None:
    with vllm_serve(folder, *MODEL, *SCHEDULER, *PROCESSOR) as (url, process):
        wait_until_ready(url, process)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as other:
            assert complete(other)
            with pytest.raises(openai.BadRequestError, match="--middleware"):
                complete(other, vllm_xargs={"steer": "context"})


# Starts vLLM in its own process once for each line of JSON that it reads, and writes what it said.
STARTS = """
import json, sys
from vllm import LLM
for line in sys.stdin:
    try:
        LLM(**json.loads(line))
        print("said: started", flush=True)
    except Exception as error:
        print("said:", repr(error), flush=True)
"""
OPTIONS = {
    "model_impl": "transformers",
    "scheduler_cls": SCHEDULER[1],
    "logits_processors": [PROCESSOR[1]],
}


def test_a_start_that_could_steer_wrongly_fails_with_what_is_missing(folder: Path) -> None:
    reasons = {
        "scheduler_cls": "--scheduler-cls juice",
        "logits_processors": "--logits-processors juice",
        "model_impl": "--model-impl transformers",
        "kv_transfer_config": "--kv-transfer-config",
        None: "started",  # at last: it changes transformers' classes in its process
    }
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    tiny = {"dtype": "float32", "max_model_len": 128, "block_size": 32, "max_num_seqs": 4}
    tiny |= {"kv_cache_memory_bytes": 33554432, "enforce_eager": True}
    lines = [
        json.dumps(
            {"model": str(folder / "model"), **tiny}
            | {each: value for each, value in OPTIONS.items() if each != name}
            | ({name: connector} if name == "kv_transfer_config" else {})
        )
        for name in reasons
    ]
    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        input="\n".join(lines),
        env={
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "JUICE_HEAD_SETS": str(folder / "head_sets"),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("said: ")]
    for reason, item in zip(reasons.values(), said, strict=True):
        assert reason in item


# With this folder in PYTHONPATH vLLM compiles by its own compiler on a CPU, too.
COMPILED = str(Path(__file__).parents[2] / "support" / "compiled")
# Starts vLLM with its options, and writes the tokens of a steered prompt and what it compiled.
COMPLETES = """
import json, sys
from juice.engine.steer import Steer
from juice.engine.vllm.plugin import PlainVllm, take_requests
from vllm import LLM, SamplingParams
from vllm.compilation.counter import compilation_counter

options, ids = map(json.loads, sys.argv[1:])
take_requests()
steered = PlainVllm(options["model"]).extra_args(Steer(target="context"))
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, extra_args=steered)
(output,) = LLM(**options).generate({"prompt_token_ids": ids}, params)
print("said:", json.dumps(list(output.outputs[0].token_ids)))
print("counted:", json.dumps(vars(compilation_counter)))
"""


@pytest.mark.long
@pytest.mark.parametrize("ahead", ["0", "1"], ids=["compiled", "ahead of time"])
def test_windows_share_nothing_that_is_compiled_and_the_next_start_takes_its_own(
    folder: Path, tmp_path: Path, ahead: str
) -> None:
    options = {
        **OPTIONS,
        "model": str(folder / "model"),
        "dtype": "float32",
        "max_model_len": 128,
        "block_size": 32,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 33554432,
        "compilation_config": {"mode": 3},
    }
    expected, said, counted = [], [], []
    for layers in ((0, 1), (2, 3), (0, 1)):
        sets = tmp_path / str(layers[0])
        with juice.load(folder / "model") as model:
            made = model.make_head_set(
                name="context", target="context", plus=[(at, 1) for at in layers], beta_plus=6
            )
            made.save(sets / "model" / "context", overwrite=True)
            ids = model.prompts.tokenizer(PROMPT)["input_ids"]
            expected += model.generate(
                [PROMPT], steer=juice.Steer(target="context", head_set=made), max_tokens=12,
                ignore_eos=True,
            )  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", COMPLETES, json.dumps(options), json.dumps(ids)],
            env={
                **os.environ,
                "JUICE_HEAD_SETS": str(sets),
                "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_USE_AOT_COMPILE": ahead,
                "PYTHONPATH": os.pathsep.join([COMPILED, *filter(None, [os.getenv("PYTHONPATH")])]),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
        said.append(tuple(json.loads(lines["said"])))
        counted.append(json.loads(lines["counted"]))
    assert said == [completion.token_ids for completion in expected]
    assert said[0] != said[1]
    if ahead == "0":  # ahead of time, vLLM 0.32 cannot keep what it compiles of transformers
        first, _, again = counted
        assert again["num_graphs_seen"] == 2, "with companions and without"
        assert again["num_compiled_artifacts_loaded"] == first["num_compiled_artifacts_saved"] > 0
        assert again["num_compiled_artifacts_saved"] == 0
