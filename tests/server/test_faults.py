"""Clients that misbehave, leave or come in crowds: nothing hangs, leaks or is a 500."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest

from juice.errors import NonFiniteError
from juice_server.errors import failure_of
from juice_server.process import connection_bound
from tests.support.serving import CONFLICT, LONG, Server, events, gauge, raw_post, serving, within


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Run a server with limits short enough to see them end things, and one token a chunk."""
    limits = (
        "--header-timeout 1 --body-timeout 1 --write-stall 1 --max-body 20KB --max-batch 8"
        " --max-queue 40 --request-timeout 20 --max-prefill-tokens 1"
    )
    with serving(*limits.split()) as running:
        yield running


def is_idle(server: Server) -> bool:
    return gauge(server.url, "requests_running") == gauge(server.url, "requests_waiting") == 0


def all_of(connection: socket.socket) -> bytes:
    """Return what comes until the server closes the connection."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def test_headers_that_arrive_slowly_are_cut_off(server: Server) -> None:
    with server.connect() as silent, server.connect() as slow:
        begun = time.monotonic()
        slow.sendall(b"POST /generate HTTP/1.1\r\nhost: localhost\r\nx-a: ")
        assert silent.recv(1) == b""
        with suppress(ConnectionResetError):
            assert slow.recv(1) == b""
        assert time.monotonic() - begun > 0.5


def test_a_connection_that_is_kept_alive_is_not_cut_between_requests(server: Server) -> None:
    with httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            assert client.get("/healthz").status_code == 200
            time.sleep(1.3)


@pytest.mark.parametrize(
    ("rest", "code"),
    [
        (b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{", b"body_timeout"),
        # Proxies differ in which of the two they believe; what follows could be another request.
        (
            b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            b"invalid_http",
        ),
    ],
    ids=["half a body", "a length beside chunks"],
)
def test_a_body_without_a_clear_end_is_a_400_and_the_end_of_the_connection(
    server: Server, rest: bytes, code: bytes
) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nhost: localhost\r\n" + rest)
        answer = all_of(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert code in answer


def test_a_body_over_the_limit_is_a_413_declared_or_chunked(server: Server) -> None:
    declared = httpx.post(f"{server.url}/generate", json={"prompt": "x" * 30_000})
    chunked = httpx.post(
        f"{server.url}/generate",
        content=iter([b"x" * 10_000] * 4),
        headers={"content-type": "application/json"},
    )
    for answer in (declared, chunked):
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
    assert (
        httpx.post(f"{server.url}/generate", json={"prompt": "x" * 19_000}).json()["error"]["code"]
        == "context_length_exceeded"
    )


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_client_that_sends_all_of_a_body_over_the_limit_reads_the_413(
    server: Server, is_chunked: bool
) -> None:
    """And may go on with its next request."""
    size = 4_000_000
    framing = "transfer-encoding: chunked" if is_chunked else f"content-length: {size}"
    body = b"%x\r\n" % size + b"x" * size + b"\r\n0\r\n\r\n" if is_chunked else b"x" * size
    head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\n{framing}\r\n\r\n".encode()
    with server.connect() as connection:
        connection.sendall(head + body)
        answer = b""
        while b"body_too_large" not in answer:
            part = connection.recv(65536)
            assert part, f"closed after {answer!r}"
            answer += part
        assert answer.startswith(b"HTTP/1.1 413")
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"HTTP/1.1 200" in answer[answer.index(b"body_too_large") :] + connection.recv(65536)


@pytest.mark.parametrize("request_lines", [
    b"GET /readyz HTTP/1.1\r\n\r\n",  # no host
    b"GET /readyz HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    b"GET /readyz HTTP/1.1\r\nhost: \xff\xfe evil\r\n\r\n",
    b"GET /info HTTP/1.1\r\nhost: http://[::1\r\n\r\n",
    b"GET http://elsewhere/readyz HTTP/1.1\r\nhost: elsewhere\r\n\r\n",
    b"POST /generate/ HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 0\r\n\r\n",
    b"GET /%00%ff%c3 HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nhost: a\r\n\r\n",
    b"BREW /generate HTTP/1.1\r\nhost: a\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /readyz HTTP/1.1\r\nhost: a\r\nx-big: " + b"a" * 100_000 + b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01",  # the start of TLS
])  # fmt: skip
def test_malformed_requests_and_odd_hosts_never_fail_the_server(
    server: Server, request_lines: bytes
) -> None:
    with server.connect() as connection:
        connection.sendall(request_lines)
        try:
            status = connection.recv(4096).split(b"\r\n")[0]
        except ConnectionResetError:
            status = b""
    assert status == b"" or status.split()[1][:1] in (b"2", b"4")
    assert b"evil" not in status
    assert httpx.get(f"{server.url}/readyz").status_code == 200


def test_a_field_that_is_given_twice_is_a_400(server: Server) -> None:
    for path, body in (
        ("/generate", '{"prompt": "a", "max_tokens": 1, "max_tokens": 400}'),
        ("/v1/completions", '{"prompt": "a", "steer": {"target": "none", "target": "context"}}'),
    ):
        answer = httpx.post(
            f"{server.url}{path}", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
        assert "twice" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_probes_answer_head_and_read_no_body(server: Server, path: str) -> None:
    answer = httpx.head(f"{server.url}{path}")
    assert (answer.status_code, answer.content) == (200, b"")
    if path == "/metrics":
        return
    with server.connect() as connection:
        # Twice what a body may have, and never sent: the answer does not wait for it.
        head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 40000\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_errors_name_no_path_of_the_machine(server: Server) -> None:
    body = {"prompt": "a", "steer": {"target": "context", "head_set": "nothing"}}
    answer = httpx.post(f"{server.url}/generate", json=body)
    assert answer.status_code == 404
    assert "/" not in answer.json()["error"]["message"]


def test_a_client_that_does_not_read_is_cut_off_and_its_rows_are_freed(server: Server) -> None:
    """Twenty alternatives a token fill the kernel's buffers long before the generation ends."""

    def rss() -> int:
        return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096

    before, cancelled = rss(), gauge(server.url, "cancelled_total")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(
            raw_post({**LONG, "prompt": ["x"] * 4, "n": 8, "stream": True, "logprobs": 20})
        )
        within(20, lambda: gauge(server.url, "requests_running") > 0, "the requests run")
        within(30, lambda: is_idle(server), "the requests end without a reader")
    assert gauge(server.url, "cancelled_total") > cancelled, "they were cut, not finished"
    assert rss() - before < 300e6


def test_a_client_that_reads_slowly_gets_everything() -> None:
    """Its answer outlasts several stall limits; only a client that reads nothing is cut off."""
    body = json.dumps({"text": "ÿ" * 300_000}, ensure_ascii=False).encode()
    head = (
        "POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type:"
        f" application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with serving("--write-stall", "0.5") as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head.encode() + body)
        answer = b""
        while part := connection.recv(16_384):
            answer += part
            time.sleep(0.005)
    headers, _, content = answer.partition(b"\r\n\r\n")
    assert f"content-length: {len(content)}".encode() in headers
    assert len(content) > 5e6, "more than the kernel's buffers hold"


def test_connections_are_fewer_where_the_system_allows_fewer_files() -> None:
    assert [connection_bound(1000, n) for n in (4096, 256, 10, resource.RLIM_INFINITY)] == [
        1000,
        160,
        1,
        1000,
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_prefill_frees_its_rows(server: Server, stream: bool) -> None:
    cancelled = gauge(server.url, "cancelled_total")
    with server.connect() as connection:
        connection.sendall(
            raw_post(
                {"prompt": "The capital city of Peru is " * 60, "max_tokens": 10, "stream": stream}
            )
        )
        within(20, lambda: gauge(server.url, "requests_running") == 1, "it runs")
    within(10, lambda: is_idle(server), "its rows are free")
    assert gauge(server.url, "cancelled_total") == cancelled + 1, "it did not run to its end"
    if not stream:
        counted = (
            'juice_requests_total{code="client_gone",route="/generate",status="499",steer="none"}'
        )
        within(
            20,
            lambda: counted in httpx.get(f"{server.url}/metrics").text,
            "it is counted as gone, not as a failure of the server",
        )


def test_a_full_queue_is_a_429_with_retry_after_and_the_probes_answer(server: Server) -> None:
    with server.connect() as running:
        running.sendall(raw_post({**LONG, "n": 8, "prompt": [CONFLICT] * 5}))
        within(20, lambda: gauge(server.url, "requests_running") == 8, "the batch is full")
        for stream in (False, True):
            answer = httpx.post(
                f"{server.url}/generate",
                json={**LONG, "n": 9 - 1, "prompt": ["x"] * 2, "stream": stream},
            )
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        assert (
            httpx.get(f"{server.url}/healthz").status_code
            == httpx.get(f"{server.url}/readyz").status_code
            == 200
        )

    within(20, lambda: is_idle(server), "all rows are free")


def test_500_clients_at_the_same_time_are_all_answered() -> None:
    """On its own server: on a busy machine 500 clients need more than the other tests' limits."""

    async def crowd(url: str) -> Counter[int]:
        async with httpx.AsyncClient(
            base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)
        ) as client:

            async def one(i: int) -> int:
                body = {
                    "prompt": f"{CONFLICT} {i}",
                    "steer": ("none", "context", "parametric")[i % 3],
                    "max_tokens": 3,
                    "stream": i % 2 == 0,
                }
                answer = await client.post("/generate", json=body)
                assert answer.status_code != 200 or ("[DONE]" in answer.text) == body["stream"]
                return answer.status_code

            return Counter(await asyncio.gather(*(one(i) for i in range(500))))

    with serving(
        "--max-batch", "8", "--max-queue", "40", "--header-timeout", "60", "--body-timeout", "60"
    ) as server:
        statuses = asyncio.run(crowd(server.url))
        assert statuses.total() == 500
        assert set(statuses) <= {200, 429, 503}
        assert statuses[200] + statuses[503] >= 40, "the batch and the queue were used"
        within(20, lambda: is_idle(server), "all rows are free")


def test_a_request_that_takes_too_long_is_a_503_or_an_event_and_frees_its_rows() -> None:
    with serving("--request-timeout", "0.4") as server:
        body = {**LONG, "n": 8}
        answer = httpx.post(f"{server.url}/generate", json=body)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "timeout"
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**body, "stream": True}
        ) as response:
            assert response.status_code == 200
            assert events(response)[-1]["error"]["code"] == "timeout"
        assert gauge(server.url, "generated_tokens_total") > 0, "what was made is counted"
        within(20, lambda: is_idle(server), "its rows are free")


def test_openais_client_does_not_send_again_what_took_too_long() -> None:
    """By itself it would: a 503 is sent three times, and each time runs to the same end."""
    with (
        serving("--request-timeout", "0.4", "--log-format", "json") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as api,
    ):
        with pytest.raises(openai.InternalServerError, match="took more than") as refused:
            api.completions.create(
                model="mini", prompt=CONFLICT, max_tokens=480, n=8, extra_body={"ignore_eos": True}
            )
        assert refused.value.response.headers["x-should-retry"] == "false"
        server.stop()  # lines of the log come after answers: now all are there
        seen = [line["code"] for line in server.log() if line.get("route") == "/v1/completions"]
    assert seen == ["timeout"]


def test_logits_that_are_not_finite_are_not_asked_for_again() -> None:
    assert failure_of(NonFiniteError()).headers == {"x-should-retry": "false"}
