"""JuICE's server on vLLM, over two ranks: its answers, and how it and vLLM's processes end."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.long
def test_a_killed_server_leaves_nothing_behind_and_starts_again(folder: Path) -> None:
    """The kernel kills like that where memory is short: the next start needs all of it."""
    for _ in range(2):
        with sharded(folder) as server:
            processes = running(server)
            assert len(processes) >= 3  # the engine's and two ranks
            server.process.kill()
            _, left = psutil.wait_procs(processes, timeout=10)
            assert not left


def test_a_script_that_ends_at_once_leaves_nothing_behind(folder: Path) -> None:
    code = (
        "import juice, os, sys\n"
        "model = juice.load(sys.argv[1], engine='vllm', window='0-1', head_sets=sys.argv[2], "
        "vllm_args={'enforce_eager': True, 'block_size': 32})\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "os._exit(0)\n"
    )
    script = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / "model"), str(folder / "head_sets")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with script:
        assert script.stdout is not None
        assert any(line == "ready\n" for line in script.stdout)
        processes = psutil.Process(script.pid).children(recursive=True)
        assert any("EngineCore" in each.name() for each in processes)
        script.communicate("now\n", timeout=10)
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not left


def running(server: Server) -> list[psutil.Process]:
    """Return the processes that a server has started, and theirs."""
    return psutil.Process(server.process.pid).children(recursive=True)
