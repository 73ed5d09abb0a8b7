"""JuICE: steer a language model toward its context or its memory, at inference time.

Source: "Taming Knowledge Conflicts in Language Models" (ICML 2025). The names below are the public
interface; they are imported at first use, so that `import juice` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from juice.quiet import quiet_imports, uncollected
from juice.version import __version__ as __version__

if TYPE_CHECKING:
    from juice.data.example import ConflictExample
    from juice.data.readers import read_examples
    from juice.engine import Completion, Limits, SamplingOptions, Steer
    from juice.errors import JuiceError
    from juice.evaluation.evaluate import evaluate
    from juice.head_set import Head, HeadSet
    from juice.identification import identify, select_heads, tune
    from juice.loading.load import load
    from juice.options import LoadOptions
    from juice.steered_model import SteeredModel

__all__ = [
    "Completion",
    "ConflictExample",
    "Head",
    "HeadSet",
    "JuiceError",
    "Limits",
    "LoadOptions",
    "SamplingOptions",
    "Steer",
    "SteeredModel",
    "evaluate",
    "identify",
    "load",
    "read_examples",
    "select_heads",
    "tune",
]

_HOMES = {
    "Completion": "juice.engine",
    "ConflictExample": "juice.data.example",
    "Head": "juice.head_set",
    "HeadSet": "juice.head_set",
    "JuiceError": "juice.errors",
    "Limits": "juice.engine",
    "LoadOptions": "juice.options",
    "SamplingOptions": "juice.engine",
    "Steer": "juice.engine",
    "SteeredModel": "juice.steered_model",
    "evaluate": "juice.evaluation.evaluate",
    "identify": "juice.identification",
    "load": "juice.loading.load",
    "read_examples": "juice.data.readers",
    "select_heads": "juice.identification",
    "tune": "juice.identification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'juice' has no attribute {name!r}")
    with quiet_imports(), uncollected():
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
