"""Serving: `python -m benchmarks.serving [--quick]`.

The engine against transformers' `generate` on a static, left-padded batch; steered against
unsteered, prompts and tokens apart; every request with its own heads and betas against one
configuration for all; 500 simultaneous clients on a real server; and how long one takes to start.
The model has the shape of a
Llama with 12 layers of width 384 and random weights; decoding is greedy, prompts have 192 to 320
tokens. The alternatives take turns in one run; each number is a median of rounds, after one to warm
up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

import juice
from benchmarks import rig
from benchmarks.rig import SMALL, medians, prompts, show
from juice.engine.load_options import Limits
from juice.engine.own.thread import BatchingEngine
from juice.engine.request import Request
from juice.engine.steer import Steering
from tests.support import tiny
from tests.support.serving import CONFLICT, Server

N_REQUESTS, N_TOKENS = 16, 64


def against_generate(
    model: juice.SteeredModel, plain: LlamaForCausalLM, n_rounds: int
) -> dict[str, float]:
    """Measure `generate` and the engine, unsteered and steered, with 1 and 16 requests."""

    def ours(
        n: int, n_tokens: int = N_TOKENS, steered: Steering | None = None
    ) -> Callable[[], object]:
        chosen = {} if steered is None else {"steering": steered}
        requests = [
            Request.of(prompt_ids=p, max_tokens=n_tokens, ignore_eos=True, **chosen)
            for p in prompts(n)
        ]
        return lambda: model.engine.generate(requests)

    def theirs(n: int) -> Callable[[], object]:
        width = max(map(len, prompts(n)))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts(n)])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts(n)])

        def run() -> object:
            with torch.inference_mode():
                return plain.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=N_TOKENS,
                    min_new_tokens=N_TOKENS,
                    do_sample=False,
                )

        return run

    shared = SMALL.steering(0)
    ways: dict[str, Callable[[], object]] = {}
    for n in (1, N_REQUESTS):
        ways[f"generate, {n}"] = theirs(n)
        ways[f"unsteered, {n}"] = ours(n)
        ways[f"unsteered prompts, {n}"] = ours(n, 1)
        ways[f"steered, {n}"] = ours(n, steered=shared)
        ways[f"steered prompts, {n}"] = ours(n, 1, steered=shared)
    return medians(ways, n_rounds)


def own_configurations(
    model: juice.SteeredModel, n_rounds: int, n_requests: int
) -> dict[str, float]:
    """Measure many requests, 32 at a time: all steered alike, and each in its own way."""
    engine = BatchingEngine(model.loaded, Limits(max_batch=32))
    own_prompts = [p[: 32 + i % 64] for i, p in enumerate(prompts(n_requests))]

    def ours(steerings: list[Steering]) -> Callable[[], object]:
        requests = [
            Request.of(prompt_ids=p, max_tokens=32, ignore_eos=True, steering=s)
            for p, s in zip(own_prompts, steerings, strict=True)
        ]
        return lambda: engine.generate(requests)

    ways = {
        "one configuration": ours([SMALL.steering(0)] * n_requests),
        "each its own": ours([SMALL.steering(i) for i in range(n_requests)]),
    }
    return medians(ways, n_rounds)


async def crowd(port: int, n_clients: int) -> Counter[int]:
    """Send the requests of all clients together, each on its own connection; count the statuses."""

    async def one(i: int) -> int:
        body = json.dumps(
            {
                "prompt": f"{CONFLICT} {i}",
                "steer": ("none", "context", "parametric")[i % 3],
                "max_tokens": 16,
                "ignore_eos": True,
            }
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            "POST /generate HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: "
            f"application/json\r\ncontent-length: {len(body)}"
        )
        writer.write(f"{head}\r\n\r\n{body}".encode())
        answer = await reader.read()
        writer.close()
        return int(answer.split(b" ", 2)[1])

    return Counter(await asyncio.gather(*(one(i) for i in range(n_clients))))


def probe(port: int, stop: Event, sink: Connection) -> None:
    """Request /healthz until `stop` is set; send the start and the duration of each request."""
    taken: list[tuple[float, float]] = []
    connection = HTTPConnection("127.0.0.1", port)
    while not stop.is_set():
        begun = time.perf_counter()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        taken.append((begun, time.perf_counter() - begun))
        time.sleep(0.01)
    sink.send(taken)


def clients_at_once(n_clients: int) -> dict[str, object]:
    """Measure a crowd on a real server and, from another process, its /healthz meanwhile."""
    server = Server()
    server.wait_until_ready()
    processes = multiprocessing.get_context("spawn")
    stop, (mine, its) = processes.Event(), processes.Pipe()
    prober = processes.Process(target=probe, args=(server.port, stop, its))
    prober.start()
    time.sleep(5)  # until it has begun
    begun = time.perf_counter()
    statuses = asyncio.run(crowd(server.port, n_clients))
    seconds = time.perf_counter() - begun
    stop.set()
    taken = [duration for asked, duration in mine.recv() if asked >= begun]
    prober.join()
    server.stop()
    p99 = statistics.quantiles(taken, n=100)[98]
    return {
        "statuses": dict(statuses),
        "seconds": seconds,
        "n_probes": len(taken),
        "healthz_p99_s": p99,
        "healthz_max_s": max(taken),
    }


def starts(n_rounds: int) -> dict[str, float]:
    """Return the seconds from `juice serve` to the first 200 of /readyz, by clock and processor.

    Each start is a fresh process; the first, which reads the libraries from disk, does not count.
    """
    found = []
    for _ in range(n_rounds + 1):
        begun = time.monotonic()
        server = Server(command=[sys.executable, "-m", "juice.cli.main", "serve"])
        server.wait_until_ready()
        ready_s = time.monotonic() - begun
        stat = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
        found.append((ready_s, (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")))
        server.stop()
    ready, used = zip(*found[1:], strict=True)
    return {"ready": statistics.median(ready), "of processor time": statistics.median(used)}


def ratios_of(seconds: dict[str, float], n: int) -> dict[str, float]:
    """Return the ratios for n requests; the time of tokens is the total less the prompts'."""

    def tokens(name: str) -> float:
        return seconds[f"{name}, {n}"] - seconds[f"{name} prompts, {n}"]

    return {
        f"unsteered against generate, {n}": seconds[f"generate, {n}"] / seconds[f"unsteered, {n}"],
        f"steered against unsteered, {n}": seconds[f"unsteered, {n}"] / seconds[f"steered, {n}"],
        f"steered against unsteered, prompts, {n}": (
            seconds[f"unsteered prompts, {n}"] / seconds[f"steered prompts, {n}"]
        ),
        f"steered against unsteered, tokens, {n}": tokens("unsteered") / tokens("steered"),
    }


def main(*, quick: bool) -> None:
    """Measure and print."""
    model = juice.load(SMALL.network(), tokenizer=tiny.tiny_tokenizer())
    n_rounds = 1 if quick else 5
    seconds = against_generate(model, SMALL.network(), n_rounds)
    show("seconds (median)", seconds)
    ratios = ratios_of(seconds, 1) | ratios_of(seconds, N_REQUESTS)
    show("ratio of rates", ratios)
    n_requests = 64 if quick else 256
    many = own_configurations(model, n_rounds, n_requests)
    show(f"seconds (median), {n_requests} requests, 32 at a time", many)
    ratios["each its own against one configuration"] = (
        many["one configuration"] / many["each its own"]
    )
    del model
    clients = clients_at_once(500)
    print(f"500 clients: {clients}")
    start = starts(n_rounds)
    show("seconds (median) from `juice serve` to ready", start)
    print(
        json.dumps(
            {
                "seconds": seconds | many,
                "ratios": ratios,
                "clients": clients,
                "start": start,
                "machine": rig.machine(),
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="run one round, as a trial")
    main(quick=parser.parse_args().quick)
