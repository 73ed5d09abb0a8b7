"""The two sides of a knowledge conflict: what the prompt says, and what the model remembers."""

from __future__ import annotations

from typing import Literal

Target = Literal["context", "parametric"]
TARGETS: tuple[Target, ...] = ("context", "parametric")
