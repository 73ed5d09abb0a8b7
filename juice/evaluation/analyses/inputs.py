"""The inputs of an analysis: what methods are prepared from, and the scores of single examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from juice.data.example import ConflictExample, conflict_types, judged_types
from juice.engine.steer import Steer
from juice.errors import ExampleError
from juice.evaluation.answers import Answer, ask
from juice.evaluation.choices import Preparer
from juice.evaluation.methods import Treatment
from juice.evaluation.options import MethodName
from juice.evaluation.splits import domain_of, limited
from juice.formula import ConflictType, Target
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Identification
from juice.head_set.scores import HeadScores
from juice.identification.options import IdentificationOptions
from juice.identification.probes import score_heads

# Most test examples of an analysis: enough to see, cheap enough to repeat for every setting.
N_EXAMPLES = 60


@dataclass(frozen=True, kw_only=True)
class AnalysisInputs(Preparer):
    """All that methods are prepared from, for one target.

    `choices` is what validation chose, by method and domain; `templates` those of paraphrases.
    """

    target: Target
    choices: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    templates: Mapping[str, Any] | None = None

    @property
    def head_set(self) -> HeadSet | None:
        """The head set that is served for the target."""
        return self.head_sets["served"].get(self.target)

    def treatments_of(self, name: MethodName) -> dict[str, Treatment]:
        """Return a method's treatments as in the tables, or as validation chooses now."""
        choices = self.choices.get(name) or self.choose(name, self.target)
        return self.treatments(name, self.target, choices)

    def ask(
        self,
        examples: Sequence[ConflictExample],
        conflict_types: Sequence[ConflictType],
        steer: Steer,
    ) -> dict[ConflictType, list[Answer | None]]:
        """Return the judged answers of all examples under one steering."""
        treatment = Treatment(target=self.target, steer=steer)
        treatments = {domain_of(e): treatment for e in examples}
        return ask(self.model, examples, conflict_types, treatments, self.target)

    @property
    def few(self) -> list[ConflictExample]:
        """Some test examples, spread over the domains."""
        return limited(self.splits.test, N_EXAMPLES, self.options.seed)

    @property
    def conflict_types(self) -> tuple[ConflictType, ...]:
        """The conflict types that every test example has."""
        return conflict_types(self.splits.test)

    @property
    def judged_types(self) -> tuple[ConflictType, ...]:
        """Those of the conflict types on which the target is judged."""
        return judged_types(self.target, self.splits.test)

    @property
    def conflicts(self) -> list[ConflictType]:
        """Those with a conflict."""
        return [t for t in self.judged_types if t != "clean"]


def pool_of(inputs: AnalysisInputs, n: int) -> list[ConflictExample]:
    """Return up to n examples that are not tested on.

    Those that the heads were found on come first, then others of their domains, then the rest.
    """
    drawn = inputs.splits.finders_of(inputs.target)
    domains = {domain_of(e) for e in drawn}
    others = [*inputs.splits.validation, *inputs.splits.large]
    Random(inputs.options.seed).shuffle(others)
    others.sort(key=lambda e: domain_of(e) not in domains)
    types = set(drawn[0].prompts)
    return [*drawn, *(e for e in others if types <= e.prompts.keys())][:n]


def score_each(inputs: AnalysisInputs, examples: Sequence[ConflictExample]) -> list[HeadScores]:
    """Return the scores of each example. Raises ExampleError for fewer than two examples."""
    if len(examples) < 2:
        raise ExampleError(
            f"{len(examples)} examples can be resampled; expected at least 2 that are not tested on"
        )
    types = judged_types(inputs.target, examples)
    return [probed(inputs, [example], types, inputs.options) for example in examples]


def probed(
    inputs: AnalysisInputs,
    examples: Sequence[ConflictExample],
    types: tuple[ConflictType, ...],
    alphas: Identification | IdentificationOptions,
) -> HeadScores:
    """Return the scores of every head toward the target, by probes with these alphas."""
    return score_heads(
        inputs.model,
        examples,
        targets={inputs.target: types},
        alphas_plus=alphas.alphas_plus,
        alphas_minus=alphas.alphas_minus,
        progress=inputs.progress,
    )[inputs.target]


def scores_of(scored: Sequence[HeadScores]) -> HeadScores:
    """Return the scores of a set of examples: the mean of theirs."""
    plus = torch.stack([one.plus for one in scored]).mean(0)
    minus = torch.stack([one.minus for one in scored]).mean(0)
    return replace(scored[0], plus=plus, minus=minus)
