"""The formula of steering, and its terms: targets, methods, gates' modes, positions, conflicts.

    z_h <- z_h + coefficient_h * source_h          for every head h of a layer

The source is z of the clean run (`juice`) or z itself (`june`). A head set and its betas are for
one target and one of METHODS. A request may also ask for `none`, or for one of CONTRASTS, which
need no head set: they choose tokens by what the context changes, in the way of other authors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeGuard

if TYPE_CHECKING:  # torch takes a second to import
    import torch

Target = Literal["context", "parametric"]
TARGETS: tuple[Target, ...] = ("context", "parametric")
OTHER: dict[Target, Target] = {"context": "parametric", "parametric": "context"}
SteerTarget = Literal["context", "parametric", "none"]
STEER_TARGETS: tuple[SteerTarget, ...] = (*TARGETS, "none")

Method = Literal["juice", "june"]
METHODS: tuple[Method, ...] = ("juice", "june")
ContrastMethod = Literal["cad", "adacad", "cocoa", "ckplug", "grd"]
SteerMethod = Literal["juice", "june", "cad", "adacad", "cocoa", "ckplug", "grd"]
# Each contrast's targets.
CONTRASTS: dict[ContrastMethod, tuple[Target, ...]] = {
    "cad": ("context",),
    "adacad": ("context",),
    "cocoa": ("context",),
    "ckplug": TARGETS,
    "grd": ("parametric",),
}
STEER_METHODS: tuple[SteerMethod, ...] = (*METHODS, *CONTRASTS)

ConflictType = Literal["clean", "substitution", "coherent"]
CONFLICT_TYPES: tuple[ConflictType, ...] = ("clean", "substitution", "coherent")
CONFLICTS: tuple[ConflictType, ...] = ("substitution", "coherent")

GateMode = Literal["auto", "off"]
GATE_MODES: tuple[GateMode, ...] = ("auto", "off")

Explain = Literal["effect"]

NamedPositions = Literal["all", "question", "generated", "last"]
NAMED_POSITIONS: tuple[NamedPositions, ...] = ("all", "question", "generated", "last")


def scales_heads(method: SteerMethod) -> TypeGuard[Method]:
    """Return whether a method scales heads, and so needs a head set."""
    return method in METHODS


def is_contrast(method: SteerMethod | None) -> TypeGuard[ContrastMethod]:
    """Return whether a method is a contrast, and so needs the prompt without its context."""
    return method in CONTRASTS


def add_scaled(z: torch.Tensor, source: torch.Tensor, coefficient: torch.Tensor) -> torch.Tensor:
    """Return z + coefficient * source, head by head, in z's dtype.

    The sum is computed in float32, or in z's dtype where that is wider, and rounded once, so that a
    coefficient such as 1.3 is not rounded first.

    Args:
        z: [..., n_heads * d_head].
        source: What is scaled, of z's shape.
        coefficient: float32 [..., n_heads]; what precedes the heads broadcasts against z.
    """
    n_heads = coefficient.shape[-1]
    by_head = source.reshape(*source.shape[:-1], n_heads, -1)  # [..., n_heads, d_head]
    scaled = coefficient.to(z.device).unsqueeze(-1) * by_head
    return (z + scaled.flatten(-2)).to(z.dtype)
