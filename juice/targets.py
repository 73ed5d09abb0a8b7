"""The two sides of a knowledge conflict: the prompt's context and the model's memory."""

from __future__ import annotations

from typing import Literal

Target = Literal["context", "parametric"]
TARGETS: tuple[Target, ...] = ("context", "parametric")
