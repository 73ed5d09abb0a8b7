"""The betas with the best accuracy on a validation set (docs/method.md, "Stage 2").

Every pair of beta_plus in {0 ... 5} and beta_minus in {0 ... -3} steers the whole validation set,
all pairs in one go. The best sum of accuracies over the target's conflict types wins; ties go to
the higher mean p_y, then to the gentler pair. A sign without heads is not varied. Validation
examples are those whose clean prompt this model answers right.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import product

from juice.data.example import ConflictExample
from juice.engine import Steer, Steering
from juice.errors import ExampleError
from juice.head_set import Betas, HeadSet
from juice.identification.trials import Trials
from juice.identification.validation import usable_validation
from juice.methods import Method, Target
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

GRID_PLUS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
GRID_MINUS = (0.0, -1.0, -2.0, -3.0)


def tune(
    model: SteeredModel,
    head_set: HeadSet,
    validation: Sequence[ConflictExample],
    *,
    method: Method = "juice",
    progress: Progress = silent,
) -> HeadSet:
    """Return the head set with a method's best betas and what they did.

    Prompts take the form in which the set's heads were found: plain, or in a chat.

    Args:
        model: The model.
        head_set: The head set to tune.
        validation: The examples to tune on, of which those that the model knows are used.
        method: `juice`, or `june` for its betas.
        progress: Reports how many prompts are answered.

    Raises:
        ExampleError: No example can be used.
        UsageError: The model was given another form of prompt.
    """
    model, target = model.in_form_of(head_set), head_set.target
    examples = usable_validation(model, validation, target)
    trials = try_betas(model, head_set, examples, method, progress)
    best = best_betas(head_set, trials)
    outcomes = {
        "accuracy": trials.outcome(best).accuracy,
        "accuracy_unsteered": trials.outcome((0.0, 0.0)).accuracy,
    }
    metrics = {f"validation_{method}": {"n_examples": len(examples), **outcomes}}
    if head_set.model.fingerprint is None:
        # Betas are tuned on these weights, so the set belongs to them from now on.
        head_set = head_set.model_copy(update={"model": model.description.identity})
    return head_set.with_betas(method, Betas(plus=best[0], minus=best[1]), metrics)


def try_betas(
    model: SteeredModel,
    head_set: HeadSet,
    examples: Sequence[ConflictExample],
    method: Method,
    progress: Progress,
) -> Trials[tuple[float, float]]:
    """Steer the examples with every pair of betas of the grid.

    Args:
        model: The model.
        head_set: The head set.
        examples: The examples to steer.
        method: `juice` for two runs, `june` for one.
        progress: Reports how many prompts are answered.
    """

    def steering(pair: tuple[float, float]) -> Steering:
        return model.resolve(
            Steer(
                target=head_set.target,
                head_set=head_set,
                beta_plus=pair[0],
                beta_minus=pair[1],
                method=method,
            )
        )

    tried = {pair: steering(pair) for pair in grid_of(head_set)}
    return Trials(
        model, examples, head_set.target, tried, f"tuning {head_set.name} betas", progress
    )


def grid_of(head_set: HeadSet) -> list[tuple[float, float]]:
    """Return the pairs of betas to try."""
    return list(
        product(
            GRID_PLUS if head_set.heads.plus else (0.0,),
            GRID_MINUS if head_set.heads.minus else (0.0,),
        )
    )


def best_betas(
    head_set: HeadSet, trials: Trials[tuple[float, float]], among: Sequence[int] | None = None
) -> tuple[float, float]:
    """Return the pair that did best on the examples at the indices `among`; None: on all."""
    return max(
        grid_of(head_set),
        key=lambda pair: (*trials.outcome(pair, among).rank, -(pair[0] - pair[1])),
    )


def tune_all(
    model: SteeredModel,
    head_sets: dict[Target, HeadSet],
    validation: Sequence[ConflictExample],
    *,
    methods: Sequence[Method],
    progress: Progress,
) -> dict[Target, HeadSet]:
    """Tune the betas of every head set.

    Where no validation example can be used, warns and leaves the set unchanged.

    Args:
        model: The model.
        head_sets: The head sets, by target.
        validation: The examples to tune on.
        methods: The methods whose betas to tune.
        progress: Reports how many prompts are answered.
    """
    tuned = dict(head_sets)
    for target in head_sets:
        for method in methods:
            try:
                tuned[target] = tune(
                    model, tuned[target], validation, method=method, progress=progress
                )
            except ExampleError as error:
                warnings.warn(
                    f"betas of {tuned[target].name!r} ({method}) stay untuned: {error}",
                    stacklevel=2,
                )
    return tuned
