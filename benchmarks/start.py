"""Start: `python -m benchmarks.start [--rounds N]`.

From the command `juice serve` to the first 200 of /readyz, in seconds of the clock and of the
process's processor time, which other work on the machine changes less. Each start is a fresh
process; the first one, which reads the libraries from disk, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from benchmarks import machine


def start() -> tuple[float, float]:
    """Start the server once; return the seconds until it is ready, by the clock and processor."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "juice.cli.main", "serve", "--port", str(port)]
    began = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:  # noqa: S603
        try:
            while not _is_ready(port):
                if process.poll() is not None:
                    raise SystemExit("the server did not start; run `juice serve` to see why")
                time.sleep(0.1)
            seconds = time.monotonic() - began
            stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            return seconds, (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
        finally:
            process.terminate()


def _is_ready(port: int) -> bool:
    with suppress(OSError):
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz").status == 200)
    return False


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = [start() for _ in range(parser.parse_args().rounds + 1)][1:]
    result = {
        "ready_s": round(statistics.median(seconds for seconds, _ in rounds), 2),
        "processor_s": round(statistics.median(used for _, used in rounds), 2),
    }
    print(json.dumps({**result, "machine": machine.describe()}))


if __name__ == "__main__":
    main()
