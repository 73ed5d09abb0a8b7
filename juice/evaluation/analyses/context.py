"""What every analysis is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from juice.evaluation.methods import MethodName
from juice.evaluation.preparation import Preparer
from juice.evaluation.splits import Splits, limited
from juice.examples import CONFLICT_TYPES, ConflictExample, ConflictType, Target
from juice.head_set import HeadSet
from juice.identification.run import Settings
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

# Analyses look at so many test examples at most: enough to see, cheap enough to repeat for every setting.
N_EXAMPLES = 60


@dataclass(frozen=True, kw_only=True)
class Context:
    """The model, the splits and the head set of one target; `choices` is what validation chose for the methods, by domain."""

    model: SteeredModel
    splits: Splits
    target: Target
    head_set: HeadSet | None
    preparer: Preparer
    settings: Settings
    choices: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    templates: Mapping[str, Any] | None = None
    seed: int = 0
    progress: Progress = silent

    def choice(self, name: MethodName) -> dict[str, Any]:
        """Return what validation chose for a method, by domain: what the tables used, or chosen now."""
        return self.choices.get(name) or self.preparer.choose(name, self.target)

    @property
    def few(self) -> list[ConflictExample]:
        """Some test examples, spread over the domains."""
        return limited(self.splits.test, N_EXAMPLES, self.seed)

    @property
    def conflict_types(self) -> tuple[ConflictType, ...]:
        """The conflict types that every test example has."""
        return tuple(t for t in CONFLICT_TYPES if all(t in e.prompts for e in self.splits.test))

    @property
    def judged_types(self) -> tuple[ConflictType, ...]:
        """The conflict types on which the target is judged: toward the context, clean prompts have no answer."""
        return tuple(t for t in self.conflict_types if t != "clean" or self.target == "parametric")
