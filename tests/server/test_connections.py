"""More connections than there is room for: who makes room, who is refused, who never notices."""

from __future__ import annotations

import socket
import time

import httpx
import pytest

from tests.support.serving import BEARER, CONFLICT, KEYS, LONG, Server, free_port, raw_post, serving

PROBE = b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n"


def is_open(connection: socket.socket) -> bool:
    """Return whether a connection that waits for nothing was not closed."""
    connection.settimeout(0.05)
    try:
        return connection.recv(4096) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


def ask(connection: socket.socket, key: str | None = None) -> bytes:
    """Send a probe and return the answer; the connection stays open."""
    line = f"authorization: Bearer {key}\r\n".encode() if key else b""
    connection.settimeout(10)
    connection.sendall(PROBE.replace(b"\r\n\r\n", b"\r\n" + line + b"\r\n"))
    answer = b""
    while not answer.endswith(b"}"):
        part = connection.recv(4096)
        assert part, f"closed after {answer!r}"
        answer += part
    return answer


def connect_from(server: Server, address: str) -> socket.socket:
    return socket.create_connection(
        ("127.0.0.1", server.port), timeout=10, source_address=(address, 0)
    )


def test_idle_connections_make_room_and_a_busy_server_says_so() -> None:
    limits = ("--max-connections", "8", "--max-connections-per-address", "20")
    with serving(*limits, "--header-timeout", "60", "--max-batch", "2") as server:
        idle = [server.connect() for _ in range(8)]
        for connection in idle:
            assert ask(connection).startswith(b"HTTP/1.1 200")
        more = [server.connect() for _ in range(3)]
        for connection in more:
            assert ask(connection).startswith(b"HTTP/1.1 200")
        # The ones that were idle longest made room.
        assert [is_open(connection) for connection in idle] == [False] * 3 + [True] * 5
        busy = [server.connect() for _ in range(8)]
        for connection in busy:
            connection.sendall(raw_post({**LONG, "stream": True}))
        time.sleep(0.3)
        answer = httpx.get(f"{server.url}/readyz")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "too_many_connections"
        assert answer.headers["retry-after"] == "1"
        assert httpx.get(f"{server.url}/readyz").status_code == 503
        for connection in (*idle, *more, *busy):
            connection.close()
        time.sleep(0.3)
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        counted = 'juice_rejections_total{reason="too_many_connections"} 2.0'
        assert counted in httpx.get(f"{server.url}/metrics").text
        (warned,) = [line for line in server.errors().splitlines() if "are refused" in line]
        assert 'refused=1 reason="8 connections are open; try again later"' in warned


def test_a_crowd_of_silent_connections_without_a_key_does_not_shut_out_those_with_one() -> None:
    keys = [word for key in KEYS for word in ("--api-key", key)]
    limits = ("--max-connections", "40", "--max-connections-per-address", "100")
    with serving(*keys, *limits, "--header-timeout", "60") as server:
        trusted = server.connect()
        trusted.sendall(
            f"GET /info HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEYS[0]}\r\n\r\n".encode()
        )
        assert trusted.recv(64).startswith(b"HTTP/1.1 200")
        trusted.settimeout(0.3)
        try:
            while trusted.recv(65536):
                pass
        except TimeoutError:
            pass
        crowd = [server.connect() for _ in range(200)]
        begun = time.monotonic()
        body = {"prompt": CONFLICT, "max_tokens": 2}
        answer = httpx.post(f"{server.url}/generate", json=body, headers=BEARER, timeout=30)
        assert answer.status_code == 200
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        assert time.monotonic() - begun < 15
        assert is_open(trusted), "a connection with a key is not the first to go"
        for connection in (trusted, *crowd):
            connection.close()


def test_one_address_cannot_have_all_connections() -> None:
    """Its idle ones make room for its new ones, its busy ones and those of others for none."""
    with serving("--max-connections", "40", "--max-connections-per-address", "3") as server:
        others = [connect_from(server, "127.0.0.2") for _ in range(3)]
        busy = [connect_from(server, "127.0.0.1") for _ in range(2)]
        for connection in busy:
            connection.sendall(raw_post({**LONG, "stream": True}))
            assert connection.recv(64).startswith(b"HTTP/1.1 200")
        idle = [connect_from(server, "127.0.0.1") for _ in range(2)]
        assert ask(idle[1]).startswith(b"HTTP/1.1 200")
        assert not is_open(idle[0])
        idle[1].sendall(raw_post({**LONG, "stream": True}))
        with connect_from(server, "127.0.0.1") as refused:
            assert ask(refused).startswith(b"HTTP/1.1 503")
        assert all(ask(connection).startswith(b"HTTP/1.1 200") for connection in others)
        assert all(is_open(connection) for connection in busy)
        for connection in (*others, *busy, *idle):
            connection.close()


@pytest.mark.parametrize("key", [None, pytest.param(KEYS[0], marks=pytest.mark.long)])
def test_a_thousand_silent_connections_of_an_address_keep_none_of_its_requests_out(
    key: str | None,
) -> None:
    keys = [word for one in KEYS for word in ("--api-key", one)] if key else []
    headers = BEARER if key else {}
    body = {"prompt": CONFLICT, "max_tokens": 2}
    with serving(*keys, "--header-timeout", "60") as server:
        silent = [server.connect() for _ in range(1000)]
        with httpx.Client(base_url=server.url, headers=headers, timeout=30) as client:
            for i in range(50):
                if i % 10 == 0:
                    silent += [server.connect() for _ in range(20)]
                assert client.post("/generate", json=body).status_code == 200
                fresh = httpx.post(f"{server.url}/generate", json=body, headers=headers, timeout=30)
                assert fresh.status_code == 200, fresh.text
        for connection in silent:
            connection.close()


def test_probes_and_metrics_have_a_port_of_their_own() -> None:
    port = free_port()
    with serving("--admin-port", str(port), "--api-key", KEYS[0]) as server:
        admin = f"http://127.0.0.1:{port}"
        for path in ("/healthz", "/readyz", "/metrics"):
            assert httpx.get(f"{admin}{path}", timeout=30).status_code == 200
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert httpx.post(f"{admin}/generate", json={"prompt": "a"}).status_code == 404
