"""A server in a network of its own that leads nowhere, and what it tries to send there.

Run in new network and mount namespaces. There is loopback, and an interface whose other end drops
what comes, with the route to everywhere and the name server behind it; the kernel counts its
packets, so every attempt is seen, whoever makes it and however. Reads the requests to send, each a
method, a path and a body or null, and writes what happened, both as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.support.serving import BEARER, KEYS, free_port

HERE = Path(__file__).parents[2]
SECONDS = 5
LINKS = (
    "ip link set lo up",
    "ip link add outside type veth peer name nowhere",
    "ip link set nowhere up",
    "ip address add 10.99.0.2/24 dev outside",
    "ip link set outside up",
    "ip neighbour add 10.99.0.1 lladdr 02:00:00:00:00:01 dev outside",
    "ip route add default via 10.99.0.1",
)


def set_up(folder: Path) -> None:
    """Make the network, and take the name server to be in it."""
    with suppress(OSError):  # neighbour discovery would count
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    for command in LINKS:
        subprocess.run(command.split(), check=True, capture_output=True)
    (folder / "resolv.conf").write_text("nameserver 10.99.0.1\noptions timeout:1 attempts:1\n")
    mount = ["mount", "--bind", str(folder / "resolv.conf"), "/etc/resolv.conf"]
    subprocess.run(mount, check=True, capture_output=True)


def n_sent() -> int:
    """Return how many packets have left."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (outside,) = [line for line in lines if line.strip().startswith("outside:")]
    return int(outside.partition(":")[2].split()[9])


def every_answer(client: httpx.Client, requests: list[tuple[str, str, Any]]) -> dict[str, int]:
    """Send every request, also for a stream where there is one, and return the statuses."""
    statuses = {}
    for method, path, body in requests:
        statuses[f"{method} {path}"] = client.request(method, path, json=body).status_code
        if body is not None and "max_tokens" in body:
            answer = client.request(method, path, json={**body, "stream": True})
            statuses[f"{method} {path}, streamed"] = answer.status_code
    return statuses


def watched(folder: Path, requests: list[tuple[str, str, Any]]) -> dict[str, Any]:
    """Serve for a while and return what was answered, and what was sent."""
    port, before = free_port(), n_sent()
    shutil.copytree(HERE / "head_sets" / "mini", folder / "head_sets" / "mini")
    command = [sys.executable, "-m", "juice.cli.main", "serve", "--port", str(port)]
    command += ["--head-sets", str(folder / "head_sets"), "--host", "0.0.0.0"]  # noqa: S104
    command += ["--api-key", KEYS[0]]
    # Nothing that tells libraries to stay offline.
    environment = {k: v for k, v in os.environ.items() if "OFFLINE" not in k}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stderr=log, stdout=log)
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, headers=BEARER, timeout=120) as client:
            for _ in range(1200):
                with suppress(httpx.TransportError):
                    if client.get("/readyz").status_code == 200:
                        break
                time.sleep(0.2)
            statuses = every_answer(client, requests)
            engine = client.get("/info").json()["engine"]["name"]
        time.sleep(SECONDS)
        server.terminate()
        code = server.wait(60)
    finally:
        server.kill()
    log_text = (folder / "log").read_text()
    sent = n_sent() - before
    return {"statuses": statuses, "engine": engine, "sent": sent, "code": code, "log": log_text}


def tried() -> dict[str, int]:
    """Send something on purpose, and return how often that was counted."""
    counts = {}
    before = n_sent()
    with socket.socket() as connection, suppress(OSError):
        connection.settimeout(0.2)
        connection.connect(("192.0.2.1", 443))
    counts["connection"] = n_sent() - before
    before = n_sent()
    with suppress(OSError):
        socket.getaddrinfo("example.org", 443)
    counts["name"] = n_sent() - before
    return counts


def main() -> None:
    """Do all of it."""
    requests = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        set_up(folder)
        sys.stdout.write(json.dumps({**watched(folder, requests), "tried": tried()}) + "\n")


if __name__ == "__main__":
    main()
