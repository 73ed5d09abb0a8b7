"""The targets and methods of steering, its gates' modes, its positions, and conflicts, by name.

A head set and its betas are for one target and one of METHODS. A request may also ask for `none`,
or for one of CONTRASTS, which need no head set.
"""

from __future__ import annotations

from typing import Literal, TypeGuard

Target = Literal["context", "parametric"]
TARGETS: tuple[Target, ...] = ("context", "parametric")
SteerTarget = Literal["context", "parametric", "none"]
STEER_TARGETS: tuple[SteerTarget, ...] = (*TARGETS, "none")

Method = Literal["juice", "june"]
METHODS: tuple[Method, ...] = ("juice", "june")
SteerMethod = Literal["juice", "june", "cad", "adacad"]
CONTRASTS: tuple[SteerMethod, ...] = ("cad", "adacad")
STEER_METHODS: tuple[SteerMethod, ...] = (*METHODS, *CONTRASTS)

ConflictType = Literal["clean", "substitution", "coherent"]
CONFLICT_TYPES: tuple[ConflictType, ...] = ("clean", "substitution", "coherent")
CONFLICTS: tuple[ConflictType, ...] = ("substitution", "coherent")

GateMode = Literal["auto", "off"]
GATE_MODES: tuple[GateMode, ...] = ("auto", "off")

Positions = Literal["all", "question"]
POSITIONS: tuple[Positions, ...] = ("all", "question")


def scales_heads(method: SteerMethod) -> TypeGuard[Method]:
    """Return whether a method scales heads, and so needs a head set."""
    return method in METHODS
