"""The version of JuICE, and of the libraries that its numbers depend on."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout that is not installed
        return "0.0.0"


__version__ = _version_of("juice-steering")


def versions() -> dict[str, str]:
    """Return the versions that are recorded with results."""
    return {"juice": __version__, **{name: _version_of(name) for name in ("torch", "transformers")}}
