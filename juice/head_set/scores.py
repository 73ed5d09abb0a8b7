"""Head scores by sign, conflict type, layer and head: what a set's heads were chosen by.

Their kind is how they were found:

    probe        the mean change of p_y when the head is scaled (method.md, stage 1, step 1)
    attribution  how fast the lead of the target's answer grows with the head's coefficient
    learned      the coefficient that the head was given, once for all conflict types

Stored as `scores.safetensors`: `plus` and `minus`, float32 [n_conflict_types, n_layers, n_heads].
The metadata has one entry, `juice`, a JSON object with the target, the conflict types and the kind:
the format writes several entries in no fixed order, and the same scores must have the same hash.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save

from juice.errors import HeadSetError
from juice.head_set.reading import read_file
from juice.methods import CONFLICT_TYPES, TARGETS

ScoreKind = Literal["attribution", "probe", "learned"]
MEANINGS: dict[ScoreKind, str] = {
    "attribution": "growth of the answer's lead in nats",
    "probe": "mean change of p_y",
    "learned": "coefficient",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadScores:
    """The scores of every head: `plus`, `minus` float32 [n_conflict_types, n_layers, n_heads]."""

    target: str
    conflict_types: tuple[str, ...]
    plus: torch.Tensor
    minus: torch.Tensor
    kind: ScoreKind = "probe"

    def to_bytes(self) -> bytes:
        """Serialise to the safetensors format."""
        metadata = json.dumps(
            {"target": self.target, "conflict_types": self.conflict_types, "kind": self.kind}
        )
        return save(
            {"plus": self.plus.contiguous(), "minus": self.minus.contiguous()}, {"juice": metadata}
        )

    def sha256(self) -> str:
        """Hash the serialised scores."""
        return "sha256:" + hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def load(cls, path: str | Path) -> HeadScores:
        """Read a scores file; raises HeadSetError for anything that is not one."""
        return cls.parse(read_file(Path(path)), path)

    @classmethod
    def parse(cls, data: bytes, path: str | Path) -> HeadScores:
        """Return the scores in the bytes of a file, which errors name; raises HeadSetError."""
        try:
            tensors = parse_safetensors(data)
            # The parser gives no metadata: they are in the header, behind its length.
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            metadata = json.loads(header["__metadata__"]["juice"])
            scores = cls(
                target=metadata["target"],
                conflict_types=tuple(metadata["conflict_types"]),
                plus=tensors["plus"],
                minus=tensors["minus"],
                kind=metadata.get("kind", "probe"),
            )
            scores._validate(path)
        except (LookupError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
            raise HeadSetError(
                f"cannot read the scores {path}: {error}; "
                "expected the file scores.safetensors of a head set"
            ) from error
        return scores

    def _validate(self, path: str | Path) -> None:
        known = {"kind": get_args(ScoreKind), "target": TARGETS}
        for name, expected in known.items():
            if (found := getattr(self, name)) not in expected:
                raise HeadSetError(
                    f"scores {path} have the {name} {found!r}; expected one of "
                    f"{', '.join(expected)}"
                )
        types = self.conflict_types
        if not set(types) <= {*CONFLICT_TYPES} or len(set(types)) < len(types) or not types:
            raise HeadSetError(
                f"scores {path} are of the conflict types {list(types)}; expected some of "
                f"{', '.join(CONFLICT_TYPES)}"
            )
        if {self.plus.dtype, self.minus.dtype} != {torch.float32}:
            raise HeadSetError(
                f"scores {path} are {self.plus.dtype} and {self.minus.dtype}; expected float32"
            )
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
