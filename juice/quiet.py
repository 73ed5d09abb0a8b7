"""Warnings that libraries give while they are imported and that no user can act on."""

from __future__ import annotations

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
