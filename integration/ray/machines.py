"""Machines for a Ray cluster: network namespaces on a bridge, each with its own processes.

A machine has its own network, processes, host name, /tmp/ray and /dev/shm. Killing it kills all its
processes at once; unplugging it takes its link down and leaves them running.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SUBNET = "10.213.77"
OUTSIDE = f"{SUBNET}.1"
BRIDGE = "juiceray"
OBJECT_STORE_BYTES = 100 << 20
# A machine that does not answer is given up after 15 to 30 s.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_enable_metrics_collection": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
# What keeps a machine in the cluster, as systemd would: Ray ends where the head has given it up.
SUPERVISED = """
mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && mount -t tmpfs tmpfs /dev/shm
hostname "$1"; shift
while true; do "$@" || true; ray stop --force >/dev/null 2>&1; sleep 1; done
"""


def missing() -> str:
    """Return what this machine lacks for the tests, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    if (
        run("ip", "netns", "list", check=False).returncode
        or run("unshare", "--net", "--mount", "--pid", "--fork", "true", check=False).returncode
    ):
        return "this system allows no namespaces"
    return ""


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done


class Machine:
    """A machine of the cluster; the first one is the head."""

    def __init__(self, number: int, environment: dict[str, str], logs: Path) -> None:
        self.name = f"{BRIDGE}{number}"
        self.address = f"{SUBNET}.{10 + number}"
        self._environment, self._log = environment, logs / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._link = f"{self.name}v"
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self._link, "type", "veth", "peer", "eth0", "netns", self.name)
        run("ip", "link", "set", self._link, "master", BRIDGE, "up")
        run("ip", "-n", self.name, "link", "set", "lo", "up")
        run("ip", "-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        run("ip", "-n", self.name, "link", "set", "eth0", "up")

    def start(self, *ray: str) -> None:
        """Start Ray, again whenever it ends."""
        ray_start = ["ray", "start", "--block", f"--node-ip-address={self.address}", *ray]
        ray_start += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--include-log-monitor=false"]
        spaces = ["ip", "netns", "exec", self.name, "unshare", "--mount", "--pid", "--uts"]
        spaces += ["--fork", "--mount-proc", "--kill-child", "bash", "-c", SUPERVISED, "bash"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*spaces, self.name, *ray_start],
                env=self._environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run(self, *command: str, timeout_s: float = 120) -> str:
        """Run a command on the machine and return what it wrote to standard output."""
        within(10, lambda: self._first_process(), "the machine has a process")
        done = subprocess.run(
            ["nsenter", "--target", self._first_process(), "--all", f"--wd={ROOT}", *command],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, (
            f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
        return done.stdout

    def _first_process(self) -> str:
        """Return the first process of the machine, seen from outside; empty while there is none."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return children.read_text().strip() if children.exists() else ""

    def unplug(self) -> None:
        """Take its link down."""
        run("ip", "link", "set", self._link, "down")

    def plug_in(self) -> None:
        """Take its link up again."""
        run("ip", "link", "set", self._link, "up")

    def kill(self) -> None:
        """Kill all its processes with SIGKILL."""
        if self._process is not None:
            # The first process takes all others of its namespace with it.
            if first := self._first_process():
                os.kill(int(first), 9)
            self._process.kill()
            self._process.wait(timeout=30)
            self._process = None

    def log(self) -> str:
        """Return what it wrote."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def remove(self) -> None:
        """Kill it, and take its network away."""
        self.kill()
        run("ip", "link", "delete", self._link, check=False)
        run("ip", "netns", "delete", self.name, check=False)


class Machines:
    """The machines of a test, the head among them."""

    def __init__(self, logs: Path) -> None:
        self._environment = {
            **os.environ,
            **ENVIRONMENT,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
        }
        self._logs = logs
        self.all: list[Machine] = []
        self.head = self.add()

    def add(self) -> Machine:
        """Return one more machine, on which nothing runs yet."""
        machine = Machine(len(self.all) + 1, self._environment, self._logs)
        self.all.append(machine)
        return machine

    def start_head(self, n_cpus: int) -> None:
        """Start the head of the cluster."""
        self.head.start(
            "--head",
            "--port=6379",
            f"--num-cpus={n_cpus}",
            "--dashboard-host=127.0.0.1",
        )

    def start_worker(self, n_cpus: int) -> Machine:
        """Start one more machine and return it."""
        machine = self.add()
        machine.start(f"--address={self.head.address}:6379", f"--num-cpus={n_cpus}")
        return machine

    def remove(self) -> None:
        """Remove all."""
        for machine in self.all:
            machine.remove()


@contextmanager
def machines(logs: Path) -> Iterator[Machines]:
    """Make a bridge for the block, and a head; all is removed at the end, or if that fails."""
    clean_up()
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    made: Machines | None = None
    try:
        run("ip", "address", "add", f"{OUTSIDE}/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        made = Machines(logs)
        yield made
    finally:
        if made is not None:
            made.remove()
        clean_up()


def clean_up() -> None:
    """Remove what a test that was killed has left."""
    for line in run("ip", "netns", "list").stdout.splitlines():
        name = line.split()[0]
        if name.startswith(BRIDGE):
            for pid in run("ip", "netns", "pids", name, check=False).stdout.split():
                run("kill", "-9", pid, check=False)
            run("ip", "link", "delete", f"{name}v", check=False)
            run("ip", "netns", "delete", name, check=False)
    run("ip", "link", "delete", BRIDGE, check=False)


def within(seconds: float, is_so: Callable[[], object], what: str, every_s: float = 0.1) -> float:
    """Wait until something is so and return the seconds that it took; fail after so many."""
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() - begun < seconds, f"not within {seconds} s: {what}"
        time.sleep(every_s)
    return time.monotonic() - begun
