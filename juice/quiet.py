"""Importing the large libraries: without their warnings that no user can act on, and quickly."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

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

    Imports make a million objects that stay; looking through them again and again finds nothing,
    and takes a sixth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
