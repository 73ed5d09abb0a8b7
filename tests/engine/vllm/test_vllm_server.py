"""JuICE's server on vLLM, over two ranks: its answers, and how it and vLLM's processes end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

import juice
from tests.support.on_vllm import save_with_set
from tests.support.serving import Server, events, gauge, within

ASKED = {"prompt": "The capital of France is", "max_tokens": 100, "ignore_eos": True}
STEERED = {**ASKED, "steer": "parametric"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    save_with_set(root, "parametric")
    return root


@contextmanager
def sharded(folder: Path, *more: str) -> Iterator[Server]:
    """Run a server of one row over two ranks; nothing of it may be left behind."""
    server = Server(
        *("--model", str(folder / "model")),
        *("--engine", "vllm", "--tp", "2", "--max-batch", "1", "--max-model-len", "128"),
        *("--vllm-arg", "enforce_eager=true", "--vllm-arg", "block_size=32", *more),
        environment={
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "JUICE_HEAD_SETS": str(folder / "head_sets"),  # the plugin reads it, too
        },
    )
    try:
        server.wait_until_ready()
        processes = running(server)
        yield server
        _, left = psutil.wait_procs(processes, timeout=20)
        assert not left
    finally:
        server.process.kill()


@pytest.mark.long
def test_a_sharded_server_answers_as_the_library_and_finishes_what_runs(folder: Path) -> None:
    with juice.load(folder / "model", head_sets=folder / "head_sets", dtype="float32") as model:
        options = {"max_tokens": 100, "ignore_eos": True}
        steered = model.generate(STEERED["prompt"], steer="parametric", **options)[0]
        unsteered = model.generate(ASKED["prompt"], **options)[0]
    assert steered.text != unsteered.text
    with sharded(folder) as server:
        url, texts = f"{server.url}/generate", list[str]()
        n_before = gauge(server.url, "step_generations_total")  # of the check at the start
        assert httpx.post(url, json=ASKED, timeout=60).json()["text"] == unsteered.text
        n_after = gauge(server.url, "step_generations_total")
        assert n_after - n_before == gauge(server.url, "generated_tokens_total")

        def stream() -> None:
            body = {**STEERED, "stream": True}
            with httpx.stream("POST", url, json=body, timeout=60) as response:
                texts.append("".join(event.get("text", "") for event in events(response)))

        thread = threading.Thread(target=stream)
        thread.start()
        within(20, lambda: gauge(server.url, "requests_running") == 1, "it runs")
        assert server.stop() == 0
        thread.join(60)
        assert texts == [steered.text]
        assert "is not checked" not in server.errors()


@pytest.mark.long
def test_a_killed_rank_ends_the_server_with_an_error_in_the_log(folder: Path) -> None:
    with sharded(folder, "--log-format", "json") as server:
        (core,) = [each for each in running(server) if "EngineCore" in each.name()]
        core.children()[-1].kill()
        assert server.process.wait(60) == 1
    told = {line["logger"]: line for line in server.log() if line["level"] == "error"}
    assert "vLLM lost a process" in told["juice_server"]["message"]
    assert any(name.startswith("vllm.") for name in told), "vLLM's processes write JSON, too"


def running(server: Server) -> list[psutil.Process]:
    """Return the processes that a server has started, and theirs."""
    return psutil.Process(server.process.pid).children(recursive=True)
