"""Keys in a file: what each may do, what is refused, and reading the file again."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from juice.errors import UsageError
from juice_server import dispatcher
from juice_server.dispatcher import RateLimits, Throughput
from juice_server.errors import RateLimitedError
from juice_server.keys import Client, Keys
from juice_server.trace import network_of
from tests.support.serving import CONFLICT, LONG, gauge, serving, within

SHORT = {"prompt": CONFLICT, "max_tokens": 2}


def entry(name: str, key: str, **more: object) -> str:
    lines = {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **more}
    return "[[keys]]\n" + "".join(f"{k} = {v!r}\n" for k, v in lines.items())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_the_keys_are_compared_whole() -> None:
    """An empty key cannot be configured; if one were, a request without a key would still fail."""
    keys = Keys(["", "k"])
    assert [keys.find(sent) is not None for sent in (b"k", b"", b"kk", b"K")] == [
        True,
        False,
        False,
        False,
    ]


def test_a_file_of_keys_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Editors on Windows write one; it would be part of the first key."""
    file = tmp_path / "keys"
    file.write_bytes("\ufefffirst\nsecond\n".encode())
    keys = Keys((), file)
    assert len(keys) == 2
    assert keys.find(b"first") is not None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[keys]]\nname = ", "not TOML"),
        ("", ": keys: "),
        ("keys = []", ": keys: "),
        ("a = " + "9" * 5000, "not TOML"),
        ("a = " + "[" * 5000, "not TOML"),
        (entry("a", "x", scope=["read"]), "scope"),
        (entry("a", "x", scopes=[]), "scopes"),
        (entry("a", "x", scopes=["write"]), "scopes"),
        (entry("a b", "x"), ".name: "),
        (entry("a", "x", max_running=0), "max_running"),
        (entry("a", "x", max_running="6"), "max_running"),
        (entry("a", "x") + entry("a", "y"), "the name a"),
        (entry("a", "x") + entry("b", "x"), "the sha256"),
        ('[[keys]]\nname = "a"\nsha256 = "secret"\n', ".sha256: "),
    ],
)
def test_a_wrong_file_is_refused_with_the_field(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        Keys((), file)
    said = str(caught.value).removeprefix(str(file)).removesuffix("with name and sha256")
    assert problem in said


def test_a_minutes_allowance_is_used_up_refills_and_takes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(dispatcher.time, "monotonic", lambda: now)
    limits = RateLimits()
    client = Client(name="a", requests_per_minute=3, tokens_per_minute=100)
    limits.take_tokens(client, 60)
    with pytest.raises(RateLimitedError, match="100 tokens a minute") as caught:
        limits.take_tokens(client, 60)
    assert caught.value.retry_after_s == pytest.approx(12)
    limits.give_back(client, 20)
    limits.take_tokens(client, 60)
    for _ in range(3):
        limits.take_request(client)
    now = 3.0
    with pytest.raises(RateLimitedError, match="3 requests a minute") as caught:
        limits.take_request(client)
    assert caught.value.retry_after_s == pytest.approx(17)
    limits.take_tokens(Client(name="b", requests_per_minute=1), 10**6)


def test_a_place_in_the_queue_takes_as_long_as_others_lately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(dispatcher.time, "monotonic", lambda: now)
    throughput = Throughput()
    assert throughput.wait_s(5) == 1
    for second in range(10):
        now = second
        throughput.note()
    assert throughput.wait_s(5) == pytest.approx(4.5)
    now = 3600.0
    assert throughput.wait_s(5) == 1, "what was an hour ago says nothing"


def test_an_address_of_ipv6_counts_as_its_network() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:2")
    assert network_of("2001:db8::1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("x" * 50_000) == "unknown"


def test_each_key_may_do_what_the_file_says_and_the_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    reader = entry("reader", "reads", scopes=["read", "metrics"])
    file.write_text(
        reader
        + entry("app", "generates", scopes=["generate"], max_waiting=2, priority=0)
        + entry("slow", "few", requests_per_minute=2, priority=5)
        + entry("urgent", "now", priority=-5)
    )
    with serving(
        "--api-keys-file", str(file), "--max-batch", "2", "--log-format", "json"
    ) as server:

        def get(path: str, key: str) -> int:
            return httpx.get(f"{server.url}{path}", headers=bearer(key)).status_code

        def post(key: str, **more: object) -> httpx.Response:
            body = {**SHORT, **more}
            return httpx.post(f"{server.url}/generate", json=body, headers=bearer(key), timeout=60)

        assert get("/info", "reads") == get("/metrics", "reads") == 200
        tokens = httpx.post(
            f"{server.url}/tokenize", json={"text": "a"}, headers=bearer("reads"), timeout=60
        )
        assert tokens.status_code == 200
        refused = post("reads")
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "permission_denied"
        assert "generate" in refused.json()["error"]["message"]
        assert get("/info", "generates") == get("/metrics", "generates") == 403
        assert get("/healthz", "generates") == 200

        # One request, however often it generates; of too many none is looked at.
        sweep = {"prompt": CONFLICT, "target": "parametric", "strengths": [0, 1]}
        swept = httpx.post(f"{server.url}/sweep", json=sweep, headers=bearer("few"), timeout=60)
        assert swept.status_code == 200, swept.text
        assert [post("few").status_code for _ in range(2)] == [200, 429]
        assert post("few", prompt=["x"] * 2000).status_code == 429
        tokenized = {"json": {"text": "x"}, "headers": bearer("few")}
        assert httpx.post(f"{server.url}/tokenize", **tokenized).status_code == 200
        limited = post("few")
        assert limited.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(limited.headers["retry-after"]) <= 60

        assert post("now", priority=-5).status_code == 200
        assert post("generates", priority=-1).status_code == 403
        assert post("generates", priority=3).status_code == 200
        assert post("generates", priority=101).status_code == 400

        file.write_text(reader + entry("new", "fresh"))
        server.process.send_signal(signal.SIGHUP)
        within(10, lambda: post("fresh").status_code == 200, "the new key is known")
        assert post("generates").status_code == 401
        file.write_text("[[keys")
        server.process.send_signal(signal.SIGHUP)
        within(10, lambda: "the keys stay as they are" in server.errors(), "the log says so")
        assert post("fresh").status_code == 200
        named = {line["key"] for line in server.log() if line.get("key")}
        assert named >= {"reader", "app", "slow", "urgent", "new"}


def test_a_hang_up_without_a_file_of_keys_ends_nothing() -> None:
    with serving() as server:
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_a_short_request_does_not_wait_behind_500_long_ones_of_another_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry("crowd", "many") + entry("one", "single"))
    options = ("--max-batch", "8", "--max-queue", "500", "--max-connections", "1000")
    with serving("--api-keys-file", str(file), *options) as server:

        def many() -> None:
            body = {**LONG, "prompt": [CONFLICT] * 31, "n": 8, "stream": True}
            with httpx.stream(
                "POST", f"{server.url}/generate", json=body, headers=bearer("many"), timeout=60
            ) as response:
                crowd.append(response.status_code)
                end.wait(60)

        crowd: list[int] = []
        end = threading.Event()
        threads = [threading.Thread(target=many) for _ in range(2)]
        for thread in threads:
            thread.start()
        authorization = bearer("single")
        within(
            30,
            lambda: gauge(server.url, "requests_waiting", **authorization) == 488,
            "the crowd waits",
        )
        answer = httpx.post(f"{server.url}/generate", json=SHORT, headers=authorization, timeout=60)
        assert answer.status_code == 200
        assert gauge(server.url, "requests_waiting", **authorization) > 460
        end.set()
        for thread in threads:
            thread.join()
        assert crowd == [200, 200]
