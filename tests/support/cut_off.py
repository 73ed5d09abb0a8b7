"""A server in a network of its own that leads nowhere, and what it tries to send there.

Run in new network and mount namespaces. There is loopback, and an interface whose other end drops
what comes, with the route to everywhere and the name server behind it; the kernel counts its
packets, so every attempt is seen, whoever makes it and however. Writes what happened as JSON.
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

from juice_server.app import create
from juice_server.settings import Settings
from tests.support.every_route import BODIES, path_of, routes_of
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


def every_answer(url: str) -> dict[str, int]:
    """Send a request to every route and return the statuses."""
    statuses = {}
    with httpx.Client(base_url=url, headers=BEARER, timeout=120) as client:
        for method, path in sorted(set(routes_of(create(Settings())))):
            body = BODIES.get((method, path))
            answer = client.request(method, path_of(path), json=body)
            statuses[f"{method} {path}"] = answer.status_code
            if body is not None and "max_tokens" in body:
                answer = client.request(method, path_of(path), json={**body, "stream": True})
                statuses[f"{method} {path}, streamed"] = answer.status_code
    return statuses


def watched(folder: Path) -> dict[str, Any]:
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
        for _ in range(1200):
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/readyz").status_code == 200:
                    break
            time.sleep(0.2)
        statuses = every_answer(url)
        engine = httpx.get(f"{url}/info", headers=BEARER).json()["engine"]["name"]
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
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        set_up(folder)
        sys.stdout.write(json.dumps({**watched(folder), "tried": tried()}) + "\n")


if __name__ == "__main__":
    main()
