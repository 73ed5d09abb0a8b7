"""The analyses by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from juice.errors import JuiceError
from juice.evaluation.analyses import heads, knock_outs, paraphrases, reversals, robustness, running_once, stability
from juice.evaluation.analyses.context import Context

ANALYSES: dict[str, Callable[[Context], dict[str, Any]]] = {
    "heads": heads.measure,
    "reversals": reversals.measure,
    "running_once": running_once.measure,
    "knock_outs": knock_outs.measure,
    "robustness": robustness.measure,
    "paraphrases": paraphrases.measure,
    "stability": stability.measure,
}


# These look at both answers: the same whatever the target.
OF_THE_MODEL = frozenset({"reversals", "knock_outs"})


def run(name: str, context: Context) -> dict[str, Any]:
    """Run one analysis; where the model or the data does not allow it, the result is the reason: {"unavailable": ...}."""
    try:
        return ANALYSES[name](context)
    except JuiceError as error:
        return {"unavailable": str(error)}
