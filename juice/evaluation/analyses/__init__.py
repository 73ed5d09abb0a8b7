"""The analyses: each measures, and returns plain data with every plotted value.

docs/evaluation.md, "Analyses", says what each is about.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from juice.errors import JuiceError
from juice.evaluation.analyses import draws, robustness, single_heads
from juice.evaluation.analyses.inputs import AnalysisInputs

ANALYSES: dict[str, Callable[[AnalysisInputs], dict[str, Any]]] = {
    "heads": single_heads.measure_heads,
    "reversals": single_heads.measure_reversals,
    "running_once": robustness.measure_running_once,
    "knock_outs": single_heads.measure_knock_outs,
    "robustness": robustness.measure_robustness,
    "paraphrases": robustness.measure_paraphrases,
    "seeds": partial(draws.measure_seeds, "attribution"),
    "seeds_learned": partial(draws.measure_seeds, "learned"),
    "seeds_probe": partial(draws.measure_seeds, "probe"),
    "stability": draws.measure_stability,
    "transfer": partial(draws.measure_transfer, "attribution"),
    "transfer_learned": partial(draws.measure_transfer, "learned"),
}
# These look at both answers, so they are the same for every target.
OF_THE_MODEL = frozenset({"reversals", "knock_outs"})


def run(name: str, inputs: AnalysisInputs) -> dict[str, Any]:
    """Run one analysis.

    Where the model or the data does not allow it, the result is {"unavailable": reason}.
    """
    try:
        return ANALYSES[name](inputs)
    except JuiceError as error:
        return {"unavailable": str(error)}
