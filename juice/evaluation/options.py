"""What is evaluated and how, for Python and the command line alike.

The fields with a description are flags of `juice evaluate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, TypedDict, get_args

from pydantic import Field

from juice.engine.sampling_options import Options
from juice.errors import UsageError
from juice.formula import Target
from juice.identification.options import ALPHAS_MINUS, ALPHAS_PLUS

MethodName = Literal[
    "original",
    "prompt",
    "cad",
    "adacad",
    "cocoa",
    "ckplug",
    "grd",
    "ph3_large",
    "ph3_small",
    "june",
    "juice",
    "served_once",
    "served",
    "learned",
    "question",
    "gated",
    "gated_apart",
]
METHOD_NAMES: tuple[MethodName, ...] = get_args(MethodName)
AnalysisName = Literal[
    "heads",
    "reversals",
    "running_once",
    "knock_outs",
    "robustness",
    "paraphrases",
    "seeds",
    "seeds_learned",
    "seeds_probe",
    "stability",
    "transfer",
    "transfer_learned",
]
ANALYSIS_NAMES: tuple[AnalysisName, ...] = get_args(AnalysisName)
EXTRA = ("matplotlib", "jinja2", "pandas", "scipy")


class EvaluationOptions(Options):
    """What is evaluated and how.

    Args:
        targets: Whose answer counts as right.
        methods: What to compare; docs/evaluation.md, "Methods", has the names.
        analyses: What else to measure.
        n_seeds: With how many seeds, from `seed` on.
        alphas_plus: Probing scales of the paper's + heads; `alphas_minus` those of the - heads.
        n_large: Most examples that PH3 finds its many-example heads on.
        measures_text: Whether plain text and longer answers are measured.
    """

    targets: tuple[Target, ...] = ("parametric", "context")
    methods: tuple[MethodName, ...] = METHOD_NAMES
    analyses: tuple[AnalysisName, ...] = ()
    head_set: str | None = Field(
        default=None,
        description=(
            "A head set: its name, folder or scores file; "
            "else the one named like the target, else found now."
        ),
    )
    limit: int | None = Field(
        default=None, ge=1, description="Facts to test on, spread over the relations."
    )
    relation: str | None = Field(
        default=None,
        description="Find heads on examples of this relation only; all relations are tested.",
    )
    n_examples: int = Field(
        default=4, ge=1, description="Examples that the paper's heads are found on."
    )
    top_k: int = Field(
        default=5, ge=1, description="Heads of each sign that they choose: 5 up to about 3B."
    )
    seed: int = Field(default=0, description="Seed of everything that is drawn.")
    n_seeds: int = Field(default=1, ge=1)
    alphas_plus: tuple[float, ...] = ALPHAS_PLUS
    alphas_minus: tuple[float, ...] = ALPHAS_MINUS
    n_large: int = 200
    measures_text: bool = True

    def with_seed(self, seed: int) -> EvaluationOptions:
        """Return these options for another seed: what is compared between seeds, and no more."""
        return self.model_copy(update={"seed": seed, "analyses": (), "measures_text": False})


class EvaluationFields(TypedDict, total=False):
    """The fields of EvaluationOptions, as keywords of `juice.evaluate`."""

    targets: Sequence[Target]
    methods: Sequence[MethodName]
    analyses: Sequence[AnalysisName]
    head_set: str | None
    limit: int | None
    relation: str | None
    n_examples: int
    top_k: int
    seed: int
    n_seeds: int


def require_extra() -> None:
    """Raise UsageError where the extra `eval` is not installed."""
    if missing := [name for name in EXTRA if find_spec(name) is None]:
        raise UsageError(
            f"evaluation needs {', '.join(missing)}; "
            "install it with: pip install 'juice-steering[eval]'"
        )
