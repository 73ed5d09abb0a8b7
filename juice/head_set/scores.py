"""Head scores: the mean change of p_y by sign, conflict type, layer and head.

They come from stage 1, step 1 of method.md. Stored as `scores.safetensors`: `plus` and `minus`,
float32 [n_conflict_types, n_layers, n_heads]. The metadata has one entry, `juice`, a JSON object
with the target and the conflict types: the format writes several entries in no fixed order, and the
same scores must have the same hash.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from juice.errors import HeadSetError


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadScores:
    """The scores of every head: `plus`, `minus` float32 [n_conflict_types, n_layers, n_heads]."""

    target: str
    conflict_types: tuple[str, ...]
    plus: torch.Tensor
    minus: torch.Tensor

    def to_bytes(self) -> bytes:
        """Serialise to the safetensors format."""
        metadata = json.dumps({"target": self.target, "conflict_types": self.conflict_types})
        return save(
            {"plus": self.plus.contiguous(), "minus": self.minus.contiguous()}, {"juice": metadata}
        )

    def sha256(self) -> str:
        """Hash the serialised scores."""
        return "sha256:" + hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def load(cls, path: str | Path) -> HeadScores:
        """Read a scores file; raises HeadSetError for anything that is not one."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = json.loads((file.metadata() or {})["juice"])
                plus, minus = file.get_tensor("plus"), file.get_tensor("minus")
            conflict_types = tuple(metadata["conflict_types"])
            scores = cls(
                target=metadata["target"], conflict_types=conflict_types, plus=plus, minus=minus
            )
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise HeadSetError(
                f"cannot read the scores {path}: {error}; "
                "expected the file scores.safetensors of a head set"
            ) from error
        scores._validate(path)
        return scores

    def _validate(self, path: Any) -> None:
        if (
            self.plus.dim() != 3
            or self.plus.shape != self.minus.shape
            or len(self.plus) != len(self.conflict_types)
        ):
            raise HeadSetError(
                f"scores {path}: plus {list(self.plus.shape)}, "
                f"minus {list(self.minus.shape)} for {len(self.conflict_types)} conflict types; "
                "expected [n_conflict_types, n_layers, n_heads] twice"
            )
        if not (self.plus.isfinite().all() and self.minus.isfinite().all()):
            raise HeadSetError(
                f"scores {path} hold values that are not finite; identify the heads again"
            )
