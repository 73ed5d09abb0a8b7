"""A base image without a registry: this machine's distribution, by debootstrap.

What an image is built from comes from where this machine takes it: apt's sources, pip's
configuration and the certificates that are trusted here are carried over. Folders of packages that
pip's configuration names are served over loopback, which a build on the host's network reaches.
"""

from __future__ import annotations

import ast
import functools
import platform
import shutil
import subprocess
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# What Debian's own images leave out, too.
DOCUMENTATION = ("usr/share/doc", "usr/share/man", "usr/share/locale")
CARRIED = ("index-url", "extra-index-url", "find-links", "trusted-host", "timeout")


def make(folder: Path) -> None:
    """Make the root of the image in a folder, about 80 MB."""
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    subprocess.run(
        ["debootstrap", "--variant=minbase", release, str(folder), _mirror(release)],
        check=True,
        capture_output=True,
        timeout=1800,
    )
    for name in (*DOCUMENTATION, "var/lib/apt/lists", "var/cache/apt"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "var/lib/apt/lists/partial").mkdir(parents=True)
    (folder / "var/cache/apt/archives/partial").mkdir(parents=True)
    shutil.copytree("/etc/apt/apt.conf.d", folder / "etc/apt/apt.conf.d", dirs_exist_ok=True)
    lines = [f"{name} = {value}" for name, value in _pip_settings().items()]
    if CERTIFICATES.exists():
        # By another name: installing the distribution's certificates writes that file anew.
        certificate = "etc/this-machine.crt"
        shutil.copy(CERTIFICATES, folder / certificate)
        lines.append(f"cert = /{certificate}")
    (folder / "etc/pip.conf").write_text("\n".join(["[global]", *lines, ""]))


def _mirror(release: str) -> str:
    """Return where apt gets the distribution's packages from."""
    listed = subprocess.check_output(
        ["apt-get", "indextargets", "--format", "$(RELEASE) $(SITE)", "Created-By: Packages"],
        text=True,
    )
    return next(site for name, site in map(str.split, listed.splitlines()) if name == release)


def _pip_settings() -> dict[str, str]:
    listed = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    settings = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in CARRIED:
            settings[name] = " ".join(map(_reachable, ast.literal_eval(value).split()))
    return settings


def _reachable(place: str) -> str:
    """Return where a build finds a place that pip looks in."""
    path = Path(urlsplit(place).path)
    return f"{_served(path.parent)}/{path.name}/" if path.is_dir() else place


@functools.cache
def _served(folder: Path) -> str:
    """Serve a folder over loopback until this process ends, and return its address."""
    handler = functools.partial(Quiet, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


class Quiet(SimpleHTTPRequestHandler):
    """Files, without a line of log for each."""

    def log_message(self, *_arguments: object) -> None:
        """Write nothing."""
