"""What goes from rank 0 to the others and back, through a pipe: calls, with tensors in them, and how they failed.

A tensor travels by its values and arrives on the receiver's own device.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Address:
    """A method of an object that has a number, or of a part of it; without a number, of the table of these objects."""

    method: str
    number: int | None = None
    attribute: str | None = None


@dataclass(frozen=True)
class Call:
    """What to call; an attempt is answered: None, or why it failed."""

    address: Address
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_attempt: bool = False


@dataclass(frozen=True)
class Failure:
    """The last that a rank says: why it ends."""

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
    """Return a message, its tensors on a device."""
    with device:
        return pickle.loads(content)  # noqa: S301 -- from the parent process
