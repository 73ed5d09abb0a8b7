"""A real model's file on several servers: `python -m benchmarks.real FILE.gguf --head-sets FOLDER`.

Every server is a process of its own on the same processors, and they take turns: who has none
rests (SIGSTOP). 1, 4 and 16 clients each send a prompt of 256 tokens of ordinary text, each another
one, and wait for its 64 new tokens, greedy; then the next. A number is the median of the rounds, of
new tokens a second by all clients together, after one round to warm up; its interval is the
smallest and the largest.

    ours      `juice serve`: unsteered, and steered toward memory in one run and in two
    vLLM      the same with `--engine vllm`, on the file's conversion (`--vllm FOLDER`, from
              `juice convert`)
    llama.cpp its server, built for these processors (`--llama-server PROGRAM`): from its sources,
              `cmake -B build -DGGML_NATIVE=ON && cmake --build build --target llama-server`
    generate  transformers' `generate`, one batch of as many prompts as there are clients

llama.cpp reads the file as it is, with activations of 8 bits; the others read the weights that it
stands for in bfloat16 or float32. So the bytes of the weights, which each step of decoding reads,
are given beside.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import torch

import juice
from benchmarks import rig
from benchmarks.vllm import is_ready
from juice.cli.options import quiet_libraries

N_CLIENTS = (1, 4, 16)
N_PROMPT, N_NEW = 256, 64
READY_S, ANSWER_S = 600.0, 600.0
VLLM_PROGRAM = Path(".venv-vllm/bin/juice")
TWO_RUNS = {"steer": {"target": "parametric", "method": "juice"}}
ONE_RUN = {"steer": {"target": "parametric", "method": "june"}}
# By server, then by way: what is sent beside the prompt.
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "ours": {"unsteered": {"steer": "none"}, "one run": ONE_RUN, "two runs": TWO_RUNS},
    "vLLM": {"unsteered": {"steer": "none"}, "one run": ONE_RUN, "two runs": TWO_RUNS},
    "llama.cpp": {"unsteered": {"cache_prompt": False}},
}


class Texts:
    """Prompts of a text, one after the other, none twice until it ends."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._prompts = [
            list(ids[at : at + N_PROMPT]) for at in range(0, len(ids) - N_PROMPT, N_PROMPT)
        ]
        self._next = count()

    def take(self, n: int) -> list[list[int]]:
        """Return the next n prompts."""
        return [self._prompts[next(self._next) % len(self._prompts)] for _ in range(n)]


class Server:
    """A running server that completes prompts; it rests but for a `turn`."""

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        with log.open("w") as output:
            self._process = subprocess.Popen(  # noqa: S603 -- our own command
                [*command, "--port", str(port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + READY_S
        while not is_ready(f"{self.url}/v1/models"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise SystemExit(f"the server did not become ready: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        self.model = str(httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"])
        self._tell(signal.SIGSTOP)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let it run for the block."""
        self._tell(signal.SIGCONT)
        try:
            yield
        finally:
            self._tell(signal.SIGSTOP)

    def complete(self, prompt: list[int], fields: dict[str, Any]) -> int:
        """Return the number of new tokens that a prompt got."""
        given = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": N_NEW,
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }
        answer = httpx.post(f"{self.url}/v1/completions", json=given, timeout=ANSWER_S)
        if answer.status_code != 200:
            raise SystemExit(f"{self.url} answered {answer.status_code}: {answer.text[:500]}")
        usage = answer.json()["usage"]
        if (usage["prompt_tokens"], usage["completion_tokens"]) != (N_PROMPT, N_NEW):
            raise SystemExit(f"{self.url} counts {usage}, not {N_PROMPT} and {N_NEW} tokens")
        return int(usage["completion_tokens"])

    def stop(self) -> None:
        """End the process."""
        self._tell(signal.SIGCONT)
        self._process.terminate()
        self._process.wait(60)

    def _tell(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)


def by_clients(server: Server, n: int, fields: dict[str, Any], texts: Texts, n_each: int) -> float:
    """Return the new tokens a second of n clients, each with some prompts one after the other."""
    prompts = [texts.take(n_each) for _ in range(n)]

    def client(mine: list[list[int]]) -> int:
        return sum(server.complete(prompt, fields) for prompt in mine)

    with server.turn(), ThreadPoolExecutor(n) as clients:
        begun = time.perf_counter()
        n_tokens = sum(clients.map(client, prompts))
        return n_tokens / (time.perf_counter() - begun)


def by_generate(model: Any, n: int, texts: Texts) -> float:
    """Return the new tokens a second of transformers' `generate` on a batch of n prompts."""
    ids = torch.tensor(texts.take(n))
    begun = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=N_NEW,
            max_new_tokens=N_NEW,
            do_sample=False,
        )
    return n * N_NEW / (time.perf_counter() - begun)


def commands_of(given: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each server."""
    threads = str(given.threads)
    ours = ["serve", "--head-sets", given.head_sets, "--threads", threads]
    commands = {"ours": [sys.executable, "-m", "juice.cli.main", *ours, "--model", given.model]}
    if given.vllm:
        on_vllm = ["--model", given.vllm, "--engine", "vllm"]
        commands["vLLM"] = [str(VLLM_PROGRAM), *ours, *on_vllm]
    if given.llama_server:
        program = [given.llama_server, "-m", given.model, "-t", threads, "-tb", threads]
        commands["llama.cpp"] = [*program, "-np", "16", "-c", "16384", "--no-ui", "-cram", "0"]
    return commands


def measure(given: argparse.Namespace, model: juice.SteeredModel) -> list[dict[str, Any]]:
    """Return a row for each way and number of clients."""
    plain = model.with_chat_template(None)
    texts = Texts(plain.tokenize(given.text.read_text(encoding="utf-8"), add_special_tokens=False))
    rates: dict[tuple[str, str, int], list[float]] = {}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ways: dict[tuple[str, str, int], Callable[[], float]] = {}
        for i, (name, command) in enumerate(commands_of(given).items()):
            server = Server(command, given.port + i, logs / f"{name}.log")
            stack.callback(server.stop)
            for way, fields in WAYS[name].items():
                for n in N_CLIENTS:
                    ways[name, way, n] = partial(by_clients, server, n, fields, texts, given.each)
        for n in N_CLIENTS:
            ways["generate", "unsteered", n] = partial(by_generate, model.loaded.model, n, texts)
        for i in range(given.rounds + 1):
            for key, run in ways.items():
                rate = run()
                print(f"round {i}: {key}: {rate:.1f} tokens a second", file=sys.stderr, flush=True)
                if i:
                    rates.setdefault(key, []).append(rate)
    return [
        {
            "server": name,
            "way": way,
            "clients": n,
            "tokens_per_s": statistics.median(found),
            "range": [min(found), max(found)],
        }
        for (name, way, n), found in rates.items()
    ]


def main(arguments: Sequence[str]) -> None:
    """Measure what the arguments say, and write it."""
    parser = argparse.ArgumentParser(prog="benchmarks.real", description=__doc__)
    parser.add_argument("model", metavar="FILE.gguf")
    parser.add_argument("--head-sets", required=True, metavar="FOLDER")
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help="ordinary text")
    parser.add_argument("--llama-server", metavar="PROGRAM")
    parser.add_argument("--vllm", metavar="FOLDER")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--each", type=int, default=2, help="prompts of a client in a round")
    parser.add_argument("--port", type=int, default=18600)
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.json")
    given = parser.parse_args(arguments)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    quiet_libraries()
    with juice.load(given.model, threads=given.threads) as model:
        rows = measure(given, model)
        weights = {id(p): p.numel() * p.element_size() for p in model.loaded.model.parameters()}
    command = shlex.join(["python", "-m", "benchmarks.real", *arguments])
    result = {
        "command": command.replace(str(Path.home()), "~"),
        "machine": rig.machine(),
        "dtype": model.description.dtype,
        "bytes": {"weights": sum(weights.values()), "file": Path(given.model).stat().st_size},
        "rows": rows,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        low, high = row["range"]
        print(
            f"{row['server']:<10}{row['way']:<11}{row['clients']:>3} clients"
            f"{row['tokens_per_s']:>8.1f} [{low:.1f}, {high:.1f}] tokens a second"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
