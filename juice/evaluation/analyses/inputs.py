"""What every analysis is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from juice.data.example import ConflictExample, conflict_types, judged_types
from juice.evaluation.choices import Preparer
from juice.evaluation.methods import MethodName
from juice.evaluation.splits import Splits, limited
from juice.head_set import HeadSet
from juice.identification import IdentificationOptions
from juice.methods import ConflictType, Target
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

# Most test examples of an analysis: enough to see, cheap enough to repeat for every setting.
N_EXAMPLES = 60


@dataclass(frozen=True, kw_only=True)
class AnalysisInputs:
    """The model, the splits and the head set of one target.

    `choices` is what validation chose, by method and domain.
    """

    model: SteeredModel
    splits: Splits
    target: Target
    head_set: HeadSet | None
    preparer: Preparer
    options: IdentificationOptions
    choices: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    templates: Mapping[str, Any] | None = None
    seed: int = 0
    progress: Progress = silent

    def choice(self, name: MethodName) -> dict[str, Any]:
        """Return what validation chose for a method, by domain: for the tables, or else now."""
        return self.choices.get(name) or self.preparer.choose(name, self.target)

    @property
    def few(self) -> list[ConflictExample]:
        """Some test examples, spread over the domains."""
        return limited(self.splits.test, N_EXAMPLES, self.seed)

    @property
    def conflict_types(self) -> tuple[ConflictType, ...]:
        """The conflict types that every test example has."""
        return conflict_types(self.splits.test)

    @property
    def judged_types(self) -> tuple[ConflictType, ...]:
        """Those of the conflict types on which the target is judged."""
        return judged_types(self.target, self.splits.test)
