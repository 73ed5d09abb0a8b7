"""What libraries say to each other while they are imported, and no user can act on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# transformers imports torchao and bitsandbytes wherever they are installed; they report what they
# cannot do here.
NOISY = ("torchao", "torch.utils._pytree", "bitsandbytes")


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Keep their warnings back within; errors pass."""
    loggers = [logging.getLogger(name) for name in NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
