"""JuICE's server against `vllm serve`: `.venv-vllm/bin/python -m benchmarks.vllm_http`.

The same model and head set, 16 steered streams at once of `/v1/completions`, in turns; medians of
the rounds, after one to warm up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

import juice
from benchmarks import machine
from benchmarks.serving import show
from benchmarks.shapes import SMALL, prompts
from benchmarks.workers import VLLM_RESTS_WITHIN_S
from tests.support import tiny
from tests.support.serving import free_port

N_STREAMS, N_TOKENS, MAX_BATCH, MAX_LEN, N_KV_BYTES = 16, 24, 16, 512, 1 << 30
READY_S = 300
PROCESSORS = ("--logits-processors", "juice.vllm.rows:RowWriter")
SCHEDULER = ("--scheduler-cls", "juice.vllm.scheduler.salting_scheduler")
MIDDLEWARE = ("--middleware", "juice_server.vllm_middleware.Steering")


def prepare(root: Path) -> None:
    """Save the model, and a head set with a head in each steered layer."""
    SMALL.network().save_pretrained(root / "model")
    tiny.tiny_tokenizer().save_pretrained(root / "model")
    with juice.load(root / "model") as model:
        heads = [(layer, 1) for layer in SMALL.steered_layers]
        made = model.make_head_set(name="context", target="context", plus=heads, beta_plus=1)
        made.save(root / "head_sets" / "model" / "context")


@contextmanager
def serving(command: list[str], root: Path, port: int, ready: str) -> Iterator[None]:
    """Run a server for the block, once it is ready."""
    environment = {**os.environ, "JUICE_HEAD_SETS": str(root / "head_sets")}
    log = root / f"{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603 -- our own command
            [*command, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        deadline = time.monotonic() + READY_S
        while not is_ready(f"http://127.0.0.1:{port}/{ready}"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not become ready: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(60)


def is_ready(url: str) -> bool:
    """Return whether a probe is answered with 200."""
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


async def stream_all(client: httpx.AsyncClient, url: str, model: str) -> float:
    """Return the seconds that all streams take together."""

    async def stream(ids: tuple[int, ...]) -> None:
        body = {
            "model": model,
            "prompt": list(ids),
            "max_tokens": N_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "steer": "context",
        }
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
        if lines[-1] != "data: [DONE]":
            raise RuntimeError(f"the stream ended with {lines[-1]}")

    begun = time.perf_counter()
    await asyncio.gather(*(stream(ids) for ids in prompts(N_STREAMS)))
    return time.perf_counter() - begun


async def measure(ports: dict[str, int], n_rounds: int) -> dict[str, float]:
    """Return the median seconds by server."""
    seconds: dict[str, list[float]] = {name: [] for name in ports}
    async with httpx.AsyncClient(timeout=600) as client:
        for round_number in range(n_rounds + 1):
            for name, port in ports.items():
                url = f"http://127.0.0.1:{port}"
                models = (await client.get(f"{url}/v1/models")).json()["data"]
                took = await stream_all(client, url, models[0]["id"])
                await asyncio.sleep(VLLM_RESTS_WITHIN_S)
                if round_number:
                    seconds[name].append(took)
    return {name: statistics.median(own) for name, own in seconds.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp())
    prepare(root)
    ports = {"vllm serve": free_port(), "juice serve": free_port()}
    sizes = {"max-model-len": MAX_LEN, "dtype": "float32"}
    common = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    plain = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(root / "model"), "--model-impl", "transformers", *common),
        *("--no-enable-prefix-caching", "--max-num-seqs", str(MAX_BATCH)),
        *("--kv-cache-memory-bytes", str(N_KV_BYTES), *PROCESSORS, *SCHEDULER, *MIDDLEWARE),
    ]
    ours = [
        *(str(Path(sys.executable).with_name("juice")), "serve", "--engine", "vllm"),
        *("--model", str(root / "model"), *common, "--max-batch", str(MAX_BATCH)),
        *("--kv-memory", str(N_KV_BYTES), "--vllm-arg", "enable_prefix_caching=false"),
    ]
    with (
        serving(plain, root, ports["vllm serve"], "health"),
        serving(ours, root, ports["juice serve"], "readyz"),
    ):
        medians = asyncio.run(measure(ports, options.rounds))
    show("seconds (median)", medians)
    print(json.dumps({"seconds": medians, "machine": machine.describe()}))


if __name__ == "__main__":
    main()
