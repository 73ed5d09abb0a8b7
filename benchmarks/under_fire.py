"""A server under fire: `python -m benchmarks.under_fire [FAULT ...]`.

Each fault is brought about on a server of its own with the bundled model, over real HTTP, and what
another client then sees is measured, beside what it sees on the same server without the fault.
Prints a table, and with `--json FILE` writes the numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

from benchmarks import rig
from tests.support.serving import CONFLICT, LONG, Server, gauge, raw_post, serving, within

SHORT = {"prompt": CONFLICT, "max_tokens": 4}
N_ROUNDS = 7
Result = dict[str, Any]


def bearer(key: str) -> dict[str, str]:
    """Return the header with a key."""
    return {"authorization": f"Bearer {key}"}


@contextmanager
def two_keys(*arguments: str) -> Iterator[Server]:
    """Run a server with the keys `crowd` and `one`."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        for name in ("crowd", "one"):
            digest = sha256(name.encode()).hexdigest()
            file.write(f'[[keys]]\nname = "{name}"\nsha256 = "{digest}"\n')
        file.flush()
        with serving("--api-keys-file", file.name, *arguments) as server:
            yield server


def short_s(server: Server, n: int = N_ROUNDS) -> float:
    """Return the median time of a request for four tokens by the key `one`."""
    times = []
    with httpx.Client(base_url=server.url, headers=bearer("one"), timeout=120) as client:
        client.get("/readyz")
        for _ in range(n):
            begun = time.monotonic()
            answer = client.post("/generate", json=SHORT)
            times.append(time.monotonic() - begun)
            assert answer.status_code == 200, answer.text
    return statistics.median(times)


def crowd_of_generations() -> Result:
    """500 requests for 480 tokens by one key; a short one by another."""
    with two_keys("--max-queue", "500") as server:
        alone = short_s(server)
        connections = [server.connect() for _ in range(2)]
        body = {**LONG, "prompt": [CONFLICT] * 31, "n": 8, "stream": True}
        for connection in connections:
            connection.sendall(_with_key(raw_post(body), "crowd"))
        within(
            60,
            lambda: gauge(server.url, "requests_waiting", **bearer("one")) > 400,
            "the crowd waits",
        )
        beside = short_s(server)
        n_left = gauge(server.url, "requests_waiting", **bearer("one"))
        for connection in connections:
            connection.close()
    return {
        "alone_s": alone,
        "beside_s": beside,
        "ratio": beside / alone,
        "waiting_afterwards": n_left,
    }


def crowd_of_large_texts() -> Result:
    """150 bodies of a million characters by one key, to tokenize; a short request by another."""
    text = "The capital of Peru is Lima. " * 34_000
    with two_keys() as server:
        alone = short_s(server)
        message = _with_key(raw_post({"text": text}, "/tokenize"), "crowd")
        connections = [server.connect() for _ in range(150)]
        threads = [threading.Thread(target=each.sendall, args=(message,)) for each in connections]
        for thread in threads:
            thread.start()
        waiting = "requests_waiting_to_be_tokenized"
        within(60, lambda: gauge(server.url, waiting, **bearer("one")) > 2, "they wait")
        beside = short_s(server)
        for thread in threads:
            thread.join()
        n_waiting = gauge(server.url, waiting, **bearer("one"))
        for connection in connections:
            connection.close()
        begun = time.monotonic()
        within(60, lambda: not gauge(server.url, waiting, **bearer("one")), "nobody waits")
        left_s = time.monotonic() - begun
    return {
        "alone_s": alone,
        "beside_s": beside,
        "ratio": beside / alone,
        "waiting_afterwards": n_waiting,
        "until_those_that_left_are_dropped_s": left_s,
    }


def idle_connections() -> Result:
    """1,000 connections that send nothing, without a key; a probe and a request."""
    _allow_files(4096)
    with two_keys("--header-timeout", "120", "--max-connections-per-address", "5000") as server:
        alone = short_s(server)
        idle = [server.connect() for _ in range(1000)]
        begun = time.monotonic()
        status = httpx.get(f"{server.url}/readyz", timeout=60).status_code
        probe_s = time.monotonic() - begun
        beside = short_s(server)
        for connection in idle:
            connection.close()
    return {"probe_status": status, "probe_s": probe_s, "alone_s": alone, "beside_s": beside}


def many_clients() -> Result:
    """2,000 clients at once, each with a connection of its own and a request for three tokens."""
    _allow_files(8192)

    async def one(server: Server, i: int) -> str:
        steer = ("none", "context", "parametric")[i % 3]
        body = {"prompt": f"{CONFLICT} {i}", "steer": steer, "max_tokens": 3}
        # httpx' pool takes longer to find 2,000 connections than the server to answer them.
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(raw_post(body))
        await writer.drain()
        try:
            return (await reader.readline()).decode().split()[1]
        finally:
            writer.close()

    async def crowd(server: Server) -> tuple[Counter[str], float]:
        begun = time.monotonic()
        answers = Counter(await asyncio.gather(*(one(server, i) for i in range(2000))))
        return answers, time.monotonic() - begun

    many = ("--max-connections", "3000", "--max-connections-per-address", "3000")
    with serving(*many, "--max-queue", "4000", "--header-timeout", "120") as server:
        answers, seconds = asyncio.run(crowd(server))
    with serving(*many, "--header-timeout", "120") as server:
        bounded, bounded_s = asyncio.run(crowd(server))
    return {
        "answers": dict(answers),
        "seconds": seconds,
        "with_a_queue_of_256": dict(bounded),
        "with_a_queue_of_256_s": bounded_s,
    }


def lost_engine() -> Result:
    """An engine that hangs, and one that dies: until the probe says so, and the process ends."""
    found: Result = {"engine_timeout_s": 5}
    for name, what in {"hang": "time.sleep(600)", "die": 'raise SystemError("lost")'}.items():
        found |= {f"{name}: {fact}": value for fact, value in _lost(what).items()}
    return found


def _lost(what: str) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        flag = Path(folder) / "flag"
        program = (
            "import time\nfrom pathlib import Path\nfrom juice.engine.own.loop import Loop\n"
            f"step = Loop.step\ndef broken(self):\n    if Path({str(flag)!r}).exists():\n"
            f"        {what}\n    step(self)\nLoop.step = broken\n"
            "from juice.cli.main import main\nmain()\n"
        )
        server = Server("--engine-timeout", "5", program=program)
        server.wait_until_ready()
        with server.connect() as connection:
            connection.sendall(raw_post(LONG))
            within(20, lambda: gauge(server.url, "requests_running") == 1, "it runs")
            flag.touch()
            begun = time.monotonic()
            within(60, lambda: not _is_healthy(server), "it is not healthy")
            unhealthy_s = time.monotonic() - begun
            status = server.process.wait(120)
            return {
                "unhealthy after_s": unhealthy_s,
                "exit status": status,
                "ended after_s": time.monotonic() - begun,
            }


def soak(seconds: float) -> Result:
    """Mixed load, with clients that leave: memory, descriptors and threads over the time."""
    with serving("--max-batch", "8") as server:
        end, counts = threading.Event(), Counter[str]()
        threads = [
            threading.Thread(target=_soaking, args=(server, i, end, counts)) for i in range(12)
        ]
        for thread in threads:
            thread.start()
        samples, begun = list[dict[str, float]](), time.monotonic()
        while time.monotonic() - begun < seconds:
            time.sleep(min(10, seconds / 10))
            samples.append(_usage(server))
        end.set()
        for thread in threads:
            thread.join()
        time.sleep(2)
        samples.append(_usage(server))
    half = len(samples) // 2
    return {
        "seconds": seconds,
        "requests": dict(counts),
        **{
            name: {
                "first half": statistics.median(sample[name] for sample in samples[1:half]),
                "second half": statistics.median(sample[name] for sample in samples[half:-1]),
                "idle at the end": samples[-1][name],
            }
            for name in ("rss_mib", "descriptors", "threads")
        },
    }


def _soaking(server: Server, i: int, end: threading.Event, counts: Counter[str]) -> None:
    n = 0
    while not end.is_set():
        n += 1
        steer = ("none", "context", "parametric")[(i + n) % 3]
        body = {"prompt": f"{CONFLICT} {n}", "steer": steer, "max_tokens": 8 + 40 * (n % 4)}
        if i % 4 == 3:
            with server.connect() as connection:
                connection.sendall(raw_post({**LONG, "stream": n % 2 == 0}))
                time.sleep(0.05 * (n % 5))
            counts["left"] += 1
            continue
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=120)
        counts[str(answer.status_code)] += 1


def _usage(server: Server) -> dict[str, float]:
    folder = Path(f"/proc/{server.process.pid}")
    status = dict(
        line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
    )
    return {
        "rss_mib": int(status["VmRSS"].split()[0]) / 1024,
        "descriptors": len(list((folder / "fd").iterdir())),
        "threads": int(status["Threads"]),
    }


def _is_healthy(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/healthz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _with_key(message: bytes, key: str) -> bytes:
    line = f"\r\nauthorization: Bearer {key}\r\n".encode()
    return message.replace(b"\r\n", line, 1)


def _allow_files(n: int) -> None:
    """Allow this process, and so its servers, as many open files as the system lets it."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(n, most), most))


FAULTS: dict[str, Callable[[], Result]] = {
    "crowd": crowd_of_generations,
    "texts": crowd_of_large_texts,
    "idle": idle_connections,
    "clients": many_clients,
    "engine": lost_engine,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", choices=[*FAULTS, []], help="which; all by default")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="only soak, for this long")
    parser.add_argument("--json", type=Path, help="a file to write the numbers to")
    given = parser.parse_args()
    found: dict[str, Any] = {"machine": rig.machine()}
    if given.soak:
        found["soak"] = soak(given.soak)
    else:
        for name in given.faults or FAULTS:
            print(f"under fire: {name}", file=sys.stderr)
            found[name] = FAULTS[name]()
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
