"""The analyses, one per file: each measures, and returns plain data with every plotted value.

heads         the score of every head, by conflict type (heat maps)
reversals     heads that help under one conflict type and hurt under another (the paper's table 1)
running_once  one run against two over the best 1 to 10 heads (table 2, figure 6)
knock_outs    MLP, attention or both removed, one layer at a time (figure 3)
robustness    accuracy over the number of examples, the number of heads and the betas (figure 5)
paraphrases   accuracy under other templates (table 7)
seeds         accuracy with what ten seeds find; also seeds_learned and seeds_probe
stability     how much the head sets of resampled examples overlap
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
