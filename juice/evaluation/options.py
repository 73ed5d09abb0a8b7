"""What is evaluated and how."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from juice.evaluation.methods import METHODS, MethodName
from juice.identification import IdentificationOptions
from juice.methods import Target

N_LARGE = 200


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What is evaluated and how.

    `head_set` names the set to use for its target. A target without one uses the set named after
    it; if there is none, heads are found as `juice identify` does. `identification` is how the
    paper's heads are found. Without `measures_text`, plain text and longer answers are left out.
    """

    targets: tuple[Target, ...] = ("parametric", "context")
    methods: tuple[MethodName, ...] = METHODS
    analyses: tuple[str, ...] = ()
    head_set: str | None = None
    limit: int | None = None
    seed: int = 0
    n_large: int = N_LARGE
    measures_text: bool = True
    identification: IdentificationOptions = field(
        default_factory=lambda: IdentificationOptions(method="probe")
    )

    def with_seed(self, seed: int) -> EvaluationOptions:
        """Return these options for another seed: what is compared between seeds, and no more."""
        return replace(
            self,
            seed=seed,
            identification=replace(self.identification, seed=seed),
            analyses=(),
            measures_text=False,
        )
