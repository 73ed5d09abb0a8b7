"""JuICE: steer a language model toward its context or its memory, at inference time.

Source: "Taming Knowledge Conflicts in Language Models" (ICML 2025). The names below are the public interface; they are
imported at first use, so that `import juice` costs nothing.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from juice.engine import Completion, Limits, Steer
    from juice.errors import JuiceError
    from juice.examples import ConflictExample
    from juice.head_set import Head, HeadSet
    from juice.identification import identify, select_heads, tune
    from juice.loading import load
    from juice.readers import read_examples
    from juice.steered_model import SteeredModel

__all__ = [
    "Completion",
    "ConflictExample",
    "Head",
    "HeadSet",
    "JuiceError",
    "Limits",
    "Steer",
    "SteeredModel",
    "identify",
    "load",
    "read_examples",
    "select_heads",
    "tune",
]

_HOMES = {
    "Completion": "juice.engine",
    "ConflictExample": "juice.examples",
    "Head": "juice.head_set",
    "HeadSet": "juice.head_set",
    "JuiceError": "juice.errors",
    "Limits": "juice.engine",
    "SteeredModel": "juice.steered_model",
    "Steer": "juice.engine",
    "identify": "juice.identification",
    "load": "juice.loading",
    "read_examples": "juice.readers",
    "select_heads": "juice.identification",
    "tune": "juice.identification",
}

try:
    __version__ = version("juice-steering")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'juice' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
