"""Servers that are told to end, are killed, or whose engine dies."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.support.serving import CONFLICT, LONG, Server, events, gauge, raw_post, within


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def how_it_was_cut(url: str, body: dict, begun: threading.Event) -> object:
    """Stream an answer; set `begun` when it has, and return the code of the error that ends it."""
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as response:
        begun.set()
        return events(response)[-1]["error"]["code"]


def test_sigterm_finishes_what_runs_and_ends_with_status_0() -> None:
    server = Server()
    server.wait_until_ready()
    whole = httpx.post(
        f"{server.url}/generate", json={**LONG, "max_tokens": 300}, timeout=60
    ).json()

    def stream() -> str:
        with httpx.stream(
            "POST",
            f"{server.url}/generate",
            json={**LONG, "max_tokens": 300, "stream": True},
            timeout=60,
        ) as response:
            return "".join(event.get("text", "") for event in events(response))

    thread, texts = in_thread(stream)
    within(20, lambda: gauge(server.url, "requests_running") == 1, "it runs")
    server.process.send_signal(signal.SIGTERM)
    thread.join(60)
    assert texts == [whole["text"]]
    assert server.process.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/healthz")


def test_sigterm_cuts_requests_at_the_drain_limit_with_an_error() -> None:
    server = Server("--drain", "0.5")
    server.wait_until_ready()
    url, body = f"{server.url}/generate", {**LONG, "n": 8, "prompt": [CONFLICT] * 2}

    begun = threading.Event()
    streaming, codes = in_thread(lambda: how_it_was_cut(url, body, begun))
    waiting, answers = in_thread(lambda: httpx.post(url, json=body, timeout=60))
    within(20, lambda: gauge(server.url, "requests_running") == 32, "they run")
    assert begun.wait(20)
    server.process.send_signal(signal.SIGTERM)
    streaming.join(60)
    waiting.join(60)
    assert server.process.wait(60) == 0
    assert codes == ["not_ready"]
    assert answers[0].status_code == 503


def test_a_second_sigterm_cuts_requests_immediately_with_an_error() -> None:
    server = Server("--max-batch", "1")
    server.wait_until_ready()
    url = f"{server.url}/generate"

    begun = threading.Event()
    streaming, codes = in_thread(lambda: how_it_was_cut(url, LONG, begun))
    assert begun.wait(20)
    within(20, lambda: gauge(server.url, "requests_running") == 1, "it runs")
    waiting, answers = in_thread(lambda: httpx.post(url, json={**LONG, "n": 8}, timeout=60))
    within(20, lambda: gauge(server.url, "requests_waiting") == 8, "they wait")
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    server.process.send_signal(signal.SIGTERM)
    streaming.join(60)
    waiting.join(60)
    assert server.process.wait(60) == 0
    assert codes == ["not_ready"]
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "not_ready"


def test_a_body_that_is_still_arriving_at_the_end_gets_a_503() -> None:
    """Pages of other origins may read it, too: their browser would hide it otherwise."""
    origin = b"https://a.example"
    server = Server("--drain", "0", "--body-timeout", "60", "--cors-origins", origin.decode())
    server.wait_until_ready()
    with server.connect() as connection:
        from_a_page = b"host: localhost\r\norigin: " + origin
        connection.sendall(raw_post(LONG).replace(b"host: localhost", from_a_page)[:-5])
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"code":"not_ready"' in answer
    assert b"access-control-allow-origin: " + origin in answer
    assert server.process.wait(60) == 0
    assert "Exception in ASGI" not in server.errors()


def test_a_killed_server_starts_again_on_its_port() -> None:
    server = Server()
    server.wait_until_ready()
    in_flight = server.connect()
    in_flight.sendall(raw_post(LONG))
    server.process.kill()
    server.process.wait(30)
    in_flight.close()
    again = Server("--port", str(server.port))
    again.port, again.url = server.port, server.url
    again.wait_until_ready()
    assert (
        httpx.post(f"{again.url}/generate", json={"prompt": CONFLICT, "max_tokens": 2}).status_code
        == 200
    )
    assert again.stop() == 0


STEP = "juice.engine.own.loop", "Loop", "step"
MLP = "transformers.models.llama.modeling_llama", "LlamaMLP", "forward"  # one in each layer of mini


def breaking(flag: Path, how: str, where: tuple[str, str, str] = STEP) -> str:
    """Return a program that serves, and whose engine breaks as only a bug could break it.

    It does so before each call of `where`, a method of a class of a module, once the flag is there.
    What hangs may take 3 seconds to end, not 15.
    """
    module, name, method = where
    return f"""
import time
import juice_server.process
juice_server.process.CLOSING_S = 3.0
from pathlib import Path
from {module} import {name}
whole = {name}.{method}
def broken(*args):
    if Path({str(flag)!r}).exists():
        {how}
    return whole(*args)
{name}.{method} = broken
from juice.cli.main import main
main()
"""


def test_an_engine_that_dies_ends_its_requests_and_the_process(tmp_path: Path) -> None:
    flag = tmp_path / "die"
    server = Server(program=breaking(flag, 'raise SystemError("the loop is broken")'))
    server.wait_until_ready()
    thread, answers = in_thread(
        lambda: httpx.post(f"{server.url}/generate", json={**LONG, "n": 8}, timeout=60)
    )
    within(20, lambda: gauge(server.url, "requests_running") == 8, "they run")
    flag.touch()
    thread.join(10)
    assert answers[0].status_code == 503
    assert server.process.wait(15) == 1
    assert "juice: error: engine failed" in server.errors()


def last_event(url: str, body: dict, begun: threading.Event) -> dict:
    """Stream an answer; set `begun` when it has, and return the event that ends it."""
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as response:
        lines = response.iter_lines()
        first = next(lines)
        begun.set()
        said = [line for line in (first, *lines) if line.startswith("data: {")]
    return json.loads(said[-1].removeprefix("data: "))


USER = {"messages": [{"role": "user", "content": CONFLICT}], "max_tokens": 400}
STREAMS: dict[str, dict] = {
    "/generate": LONG,
    "/compare": LONG,
    "/v1/completions": {"model": "mini", **LONG},
    "/v1/chat/completions": {"model": "mini", **USER, "ignore_eos": True},
    "/v1/responses": {
        "model": "mini", "input": CONFLICT, "max_output_tokens": 400, "ignore_eos": True,
    },
    "/v1/messages": {"model": "mini", **USER, "ignore_eos": True},
}  # fmt: skip


def test_an_engine_that_hangs_is_seen_and_ends_what_runs_and_the_process(tmp_path: Path) -> None:
    """Nothing that the engine has will ever be answered by it; the probes say so at once.

    Kills: streams that just stop, so that their clients wait for a token for ever.
    """
    flag = tmp_path / "hang"
    server = Server("--engine-timeout", "3", program=breaking(flag, "time.sleep(600)"))
    server.wait_until_ready()
    thread, answers = in_thread(lambda: httpx.post(f"{server.url}/generate", json=LONG, timeout=60))
    begun = [threading.Event() for _ in STREAMS]
    streams = [
        in_thread(partial(last_event, server.url + door, body, event))
        for (door, body), event in zip(STREAMS.items(), begun, strict=True)
    ]
    assert all(event.wait(20) for event in begun)
    states: dict[str, set[int]] = {"/healthz": set(), "/readyz": set()}

    def is_lost() -> bool:
        for probe, seen in states.items():
            with suppress(httpx.TransportError):
                seen.add(httpx.get(server.url + probe).status_code)
        return all(503 in seen for seen in states.values())

    flag.touch()
    within(20, is_lost, "it is neither healthy nor ready")
    thread.join(20)
    assert answers[0].status_code == 503
    for (stream, ends), door in zip(streams, STREAMS, strict=True):
        stream.join(20)
        assert ends, f"{door} just stopped"
        error = ends[0].get("error", ends[0])
        assert error.get("code") == "not_ready" or error["type"] == "overloaded_error", (door, ends)
    assert server.process.wait(30) == 1


def test_a_forward_may_take_long_but_not_a_layer(tmp_path: Path) -> None:
    """Kills: a long prompt on a slow machine that ends the process; a heartbeat of its own."""
    flag = tmp_path / "seconds"
    how = f"time.sleep(float(Path({str(flag)!r}).read_text()))"
    server = Server("--engine-timeout", "3", program=breaking(flag, how, MLP))
    server.wait_until_ready()
    ask = partial(httpx.post, f"{server.url}/generate", timeout=60)
    body = {"prompt": CONFLICT, "max_tokens": 1}

    flag.write_text("1")
    begun = time.monotonic()
    answer = ask(json=body)
    assert answer.status_code == 200, server.errors()
    assert time.monotonic() - begun > 6, "its six layers took longer than the engine may"

    flag.write_text("600")
    assert ask(json=body).status_code == 503
    assert server.process.wait(30) == 1


def test_a_lame_duck_is_not_ready_but_takes_requests_until_its_time_is_over() -> None:
    server = Server("--lame-duck", "8")
    server.wait_until_ready()
    server.process.send_signal(signal.SIGTERM)
    within(6, lambda: httpx.get(f"{server.url}/readyz").status_code == 503, "it is not ready")
    assert httpx.get(f"{server.url}/healthz").status_code == 200
    answer = httpx.post(f"{server.url}/generate", json={"prompt": CONFLICT, "max_tokens": 2})
    assert answer.status_code == 200
    assert server.process.wait(30) == 0
