"""How a model takes its rows: what the self-check finds out at load, fastest first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mode:
    """What a model needs of the rows of a forward.

    `full_rows`: its layers must all see the same rows, so a dual run is two of them from the first layer to the last. `own_masks`:
    it masks and biases its attention by itself, so only rows with as many tokens cached go together. `window`: for a check, the tokens
    of every sliding window, instead of its own.
    """

    full_rows: bool = False
    own_masks: bool = False
    window: int | None = None


MODES = (Mode(), Mode(full_rows=True), Mode(own_masks=True), Mode(full_rows=True, own_masks=True))
