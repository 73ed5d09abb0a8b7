"""The nginx block of the page about Kubernetes, in front of two servers: streams and an upgrade."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.support.page_blocks import ROOT, run_by
from tests.support.serving import LONG, Server, free_port, within

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
PAGE = ROOT / "docs" / "how-to" / "kubernetes.md"


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    asked = ("--allowed-hosts", "juice")  # the name of the block's upstream
    started = Server(*asked, "--lame-duck", "4"), Server(*asked)
    try:
        for server in started:
            server.wait_until_ready()
        yield started
    finally:
        for server in started:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()


@pytest.fixture
def url(servers: tuple[Server, Server], tmp_path: Path) -> Iterator[str]:
    """Run nginx as the page says, with the addresses of these servers."""
    (block,) = [each.text for each in run_by(PAGE, "integration/deploy/test_nginx.py")]
    port = free_port()
    for i, server in enumerate(servers, 1):
        block = block.replace(f"10.0.0.{i}:8000", f"127.0.0.1:{server.port}")
    block = block.replace("listen 80;", f"listen 127.0.0.1:{port};")
    temporary = "".join(
        f"{kind}_temp_path {tmp_path / kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    file = tmp_path / "nginx.conf"
    file.write_text(
        f"daemon off;\npid {tmp_path / 'pid'};\nerror_log {tmp_path / 'errors'};\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}{block}}}\n"
    )
    process = subprocess.Popen([str(NGINX), "-c", str(file)], stderr=subprocess.DEVNULL)

    def is_up() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        return False

    try:
        within(20, is_up, "nginx answers")
        yield f"http://127.0.0.1:{port}/generate"
    finally:
        process.terminate()
        process.wait()


def test_a_stream_comes_through_as_it_is_made(url: str) -> None:
    """Kills: buffering, which over HTTP/1.0 sends some kilobytes of events at once."""
    with httpx.stream("POST", url, json={**LONG, "stream": True}, timeout=120) as response:
        pieces = list(response.iter_raw())
    n_events = b"".join(pieces).count(b"data: ")
    assert n_events > 100
    assert len(pieces) > n_events / 2


def test_a_server_that_leaves_costs_no_request(url: str, servers: tuple[Server, Server]) -> None:
    """Clients ask until nginx finds its port closed. Kills: no other attempt."""
    leaving = servers[0].process
    body = {**LONG, "max_tokens": 40}

    def ask() -> list[int]:
        statuses = []
        while leaving.poll() is None or len(statuses) < 5:
            statuses.append(httpx.post(url, json=body, timeout=300).status_code)
        return statuses

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask) for _ in range(8)]
        time.sleep(0.5)
        leaving.send_signal(signal.SIGTERM)
        statuses = [status for one in asked for status in one.result()]
    assert leaving.wait(60) == 0
    assert statuses == [200] * len(statuses)
    assert len(statuses) >= 40
