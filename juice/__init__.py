"""JuICE: steer a language model toward its context or its memory, at inference time.

Source: "Taming Knowledge Conflicts in Language Models" (ICML 2025). The names below are the public
interface; they are imported at first use, so that `import juice` costs nothing.
"""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from juice.version import __version__ as __version__

if TYPE_CHECKING:
    from juice.data.example import ConflictExample
    from juice.data.readers.sources import read_examples
    from juice.engine.answer import Completion
    from juice.engine.load_options import Limits, LoadOptions
    from juice.engine.request import GenerationOptions
    from juice.engine.sampling_options import SamplingOptions
    from juice.engine.steer import FirstGenerated, Steer
    from juice.errors import JuiceError
    from juice.evaluation.run import evaluate
    from juice.head_set.head_set import HeadSet
    from juice.head_set.schema import Head
    from juice.identification.find import identify, select_heads
    from juice.identification.tune import tune
    from juice.loading import load
    from juice.steered_model import SteeredModel

__all__ = [
    "Completion",
    "ConflictExample",
    "FirstGenerated",
    "GenerationOptions",
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
    "Completion": "juice.engine.answer",
    "ConflictExample": "juice.data.example",
    "FirstGenerated": "juice.engine.steer",
    "GenerationOptions": "juice.engine.request",
    "Head": "juice.head_set.schema",
    "HeadSet": "juice.head_set.head_set",
    "JuiceError": "juice.errors",
    "Limits": "juice.engine.load_options",
    "LoadOptions": "juice.engine.load_options",
    "SamplingOptions": "juice.engine.sampling_options",
    "Steer": "juice.engine.steer",
    "SteeredModel": "juice.steered_model",
    "evaluate": "juice.evaluation.run",
    "identify": "juice.identification.find",
    "load": "juice.loading",
    "read_examples": "juice.data.readers.sources",
    "select_heads": "juice.identification.find",
    "tune": "juice.identification.tune",
}


# transformers imports torchao and bitsandbytes wherever they are installed; they warn of what they
# cannot do on this machine.
NOISY = ("torchao", "torch.utils._pytree", "bitsandbytes")


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Suppress these warnings while within; errors pass."""
    loggers = [logging.getLogger(name) for name in NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage while within.

    Imports make a million objects that stay; looking through them takes a sixth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'juice' has no attribute {name!r}")
    with quiet_imports(), uncollected():
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
