"""The targets and the methods of steering, by name.

A head set and its betas are for one target and one of METHODS. A request may also ask for `none`,
or for `cad`, which needs no head set.
"""

from __future__ import annotations

from typing import Literal

Target = Literal["context", "parametric"]
TARGETS: tuple[Target, ...] = ("context", "parametric")
SteerTarget = Literal["context", "parametric", "none"]
STEER_TARGETS: tuple[SteerTarget, ...] = (*TARGETS, "none")

Method = Literal["juice", "june"]
METHODS: tuple[Method, ...] = ("juice", "june")
SteerMethod = Literal["juice", "june", "cad"]
STEER_METHODS: tuple[SteerMethod, ...] = (*METHODS, "cad")
