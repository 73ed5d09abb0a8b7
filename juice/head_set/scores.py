"""The scores of a head set: the numbers by which its heads were chosen.

They are for each sign, conflict type, layer and head. Their kind:

    probe        the mean change of p_y when the head is scaled (method.md, stage 1, step 1)
    attribution  how fast the lead of the target's answer grows with the head's coefficient
    learned      the coefficient that the head was given, once for all conflict types
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from juice.errors import HeadSetError
from juice.files import sha256_of
from juice.formula import CONFLICT_TYPES, TARGETS

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
        return sha256_of(self.to_bytes())

    @classmethod
    def parse(cls, data: bytes, path: str | Path) -> HeadScores:
        """Return the scores in the bytes of a file, which errors name; raises HeadSetError."""
        try:
            tensors = load(data)
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
            problem = scores._problem()
        except (LookupError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
            raise HeadSetError(
                f"cannot read the scores {path}: {error}; "
                "expected the scores file of a head set, such as scores-<hash>.safetensors"
            ) from error
        if problem:
            raise HeadSetError(f"scores {path} {problem}")
        return scores

    def _problem(self) -> str | None:
        """Return the problem of the scores, as words after their name; None without one."""
        for name, known in (("kind", get_args(ScoreKind)), ("target", TARGETS)):
            if (value := getattr(self, name)) not in known:
                return f"have the {name} {value!r}; expected one of {', '.join(known)}"
        types, plus, minus = self.conflict_types, self.plus, self.minus
        if not set(types) <= {*CONFLICT_TYPES} or len(set(types)) < len(types) or not types:
            return (
                f"are of the conflict types {list(types)}; expected some of "
                f"{', '.join(CONFLICT_TYPES)}"
            )
        if {plus.dtype, minus.dtype} != {torch.float32}:
            return f"are {plus.dtype} and {minus.dtype}; expected float32"
        if plus.dim() != 3 or plus.shape != minus.shape or len(plus) != len(types):
            return (
                f"have plus {list(plus.shape)}, minus {list(minus.shape)} for {len(types)} "
                "conflict types; expected [n_conflict_types, n_layers, n_heads] twice"
            )
        if not (plus.isfinite().all() and minus.isfinite().all()):
            return "hold values that are not finite; identify the heads again"
        return None
