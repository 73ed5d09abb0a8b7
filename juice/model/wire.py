"""What goes through the pipe between rank 0 and another rank: calls with tensors, and failures.

Tensors are sent by value and arrive on the receiver's own device.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Address:
    """A method of a numbered object, or of a part of it.

    Without a number it is a method of the table of these objects.
    """

    method: str
    number: int | None = None
    attribute: str | None = None


@dataclass(frozen=True)
class Call:
    """A call; an attempt is answered with None or the reason it failed."""

    address: Address
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_attempt: bool = False


@dataclass(frozen=True)
class Failure:
    """A rank's last message: why it ends."""

    text: str


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return (
            (torch.tensor, (value.numpy(force=True),))
            if isinstance(value, torch.Tensor)
            else NotImplemented
        )


def packed(message: Any) -> bytes:
    """Return a message as bytes."""
    content = io.BytesIO()
    _Pickler(content, pickle.HIGHEST_PROTOCOL).dump(message)
    return content.getvalue()


def unpacked(content: bytes, device: torch.device) -> Any:
    """Return the message in these bytes, with its tensors on a device."""
    with device:
        return pickle.loads(content)  # noqa: S301 -- from the parent process
