"""The window: the layers in which requests have companions, fixed when vLLM starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from juice.engine import Steering
from juice.errors import HeadSetMismatchError, RequestError
from juice.head_set import HeadSet

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "juice_window"
_chosen_by: list[Callable[[VllmConfig], range]] = []


def choose_window(asked: str, head_sets: Iterable[HeadSet], n_layers: int) -> range:
    """Return the layers that get companions.

    Args:
        asked: `auto` for the layers of the head sets, `all`, or the first and last, such as `3-9`.
        head_sets: The head sets that may be asked for.
        n_layers: The layers of the model.

    Raises:
        RequestError: `asked` is none of these, or names a layer that the model does not have.
    """
    if asked == "all":
        return range(n_layers)
    if asked == "auto":
        layers = [head.layer for own in head_sets for head in (*own.heads.plus, *own.heads.minus)]
        return range(min(layers), max(layers) + 1) if layers else range(0)
    found = re.fullmatch(r"(\d+)-(\d+)", asked)
    if found is None or not int(found[1]) <= int(found[2]) < n_layers:
        raise RequestError(
            f"window is {asked!r}; expected auto, all, or the first and the last layer that can be "
            f"steered, such as 0-{n_layers - 1}",
            param="window",
        )
    return range(int(found[1]), int(found[2]) + 1)


def window_of(vllm_config: VllmConfig) -> range:
    """Return the window that vLLM was started with; empty where it was started without one."""
    given = vllm_config.additional_config.get(KEY)
    if given is None:
        return _chosen_by[-1](vllm_config) if _chosen_by else range(0)
    first, last = given
    return range(first, last + 1)


def set_default(window: Callable[[VllmConfig], range]) -> None:
    """Set what chooses the window where vLLM was started by its own command."""
    _chosen_by.append(window)


def check_layers(steering: Steering, window: range) -> None:
    """Raise HeadSetMismatchError for a head outside the window."""
    for layer in steering.coefficients:
        if layer not in window:
            there = f"layers {window.start} to {window.stop - 1}" if window else "no layer"
            raise HeadSetMismatchError(
                f"a head of layer {layer} is to be steered; this engine steers {there}: start it "
                "with a head set of that layer in its folder, or with --window all"
            )
