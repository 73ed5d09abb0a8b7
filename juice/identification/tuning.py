"""The head set and the betas that do best on validation examples (docs/method.md, "Choosing").

Candidates are compared, and betas searched, by the first new token: that costs a prefill of a few
prompts each. It counts how many answers begin right, less what steering breaks where it is not
needed. The best betas then generate the answers to all validation prompts, and so does the
unsteered model: their accuracies and the gain, with its interval, go into the set.
Validation examples are those whose clean prompt this model answers right.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from random import Random
from statistics import fmean

from juice.data.example import ConflictExample
from juice.data.readers import Examples, read_examples
from juice.engine import Steer
from juice.engine.steering import unsteered
from juice.errors import ExampleError, UsageError
from juice.head_set import Betas, HeadSet, Validation
from juice.identification.candidates import UNSTEERED, Search
from juice.identification.gates import measured_gate
from juice.identification.grid import best_betas, grid_of, try_betas
from juice.identification.intervals import difference_interval
from juice.identification.protection import DEFAULT, Protection
from juice.identification.trials import Choice, Trials
from juice.identification.unfinished import Unfinished
from juice.identification.validation import taking_turns, usable_validation
from juice.methods import Method, Target
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

N_READ = 20
N_PROTECTED = 40
N_FINALISTS = 2


def tune(
    model: SteeredModel,
    head_set: HeadSet,
    validation: Examples,
    *,
    method: Method = "juice",
    progress: Progress = silent,
) -> HeadSet:
    """Return the head set with a method's best betas and what they did.

    Prompts take the form in which the set's heads were found: plain, or in a chat.

    Args:
        model: The model.
        head_set: The head set to tune.
        validation: The examples to tune on, of which those that the model knows are used; as for
            `juice.identify`.
        method: `juice`, or `june` for its betas.
        progress: Reports how many prompts are read and answered.

    Raises:
        ExampleError: No example can be used.
        UsageError: The model was given another form of prompt, or each head has its own beta.
    """
    examples = read_examples(validation, split="validation")
    return choose(model, [head_set], examples, method=method, progress=progress)


def choose(
    model: SteeredModel,
    candidates: Sequence[HeadSet],
    validation: Sequence[ConflictExample],
    *,
    method: Method = "juice",
    grid: bool = False,
    protection: Protection = DEFAULT,
    progress: Progress = silent,
) -> HeadSet:
    """Return the candidate that does best, tuned; see `tune`.

    Args:
        model: The model.
        candidates: Head sets toward one target, found in one form of prompt.
        validation: The examples to choose and tune on.
        method: Whose betas to tune.
        grid: Whether to try every pair of the paper's grid, of the first candidate alone.
        protection: What steering should leave alone.
        progress: Reports how many prompts are read and answered.
    """
    first = candidates[0]
    betas = first.betas(method)
    if betas is not None and betas.is_per_head:
        raise UsageError(
            f"each head of the set {first.name!r} has a beta of its own; there is nothing to tune: "
            "change its strength in requests, or learn it again (`juice identify --method learned`)"
        )
    model, target = model.in_form_of(first), first.target
    examples = usable_validation(model, validation, target)
    if grid:
        chosen, pairs = first, grid_of(first)
    else:
        mixed = Random(0).sample(examples, len(examples))  # a file may be sorted by relation
        some, more = taking_turns(mixed[:N_READ], target), mixed[:N_PROTECTED]
        search = Search(model, target, some, more, method, protection, progress)
        chosen, pairs = search.best(candidates)
        pairs = pairs[:N_FINALISTS]
    trials = try_betas(model, chosen, examples, method, progress, [*pairs, UNSTEERED])
    best = best_betas(trials, pairs)
    if chosen.model.fingerprint is None:
        # Betas are tuned on these weights, so the set belongs to them from now on.
        chosen = chosen.model_copy(update={"model": model.description.identity})
    tuned = chosen.with_betas(method, Betas(plus=best[0], minus=best[1]))
    gate, side_effects = measured_gate(model, tuned, method, examples, protection, progress)
    measured = _with_validation(tuned, method, trials, best, UNSTEERED, side_effects)
    return measured.with_gate(method, gate)


def measure(
    model: SteeredModel,
    head_set: HeadSet,
    validation: Sequence[ConflictExample],
    *,
    method: Method = "juice",
    protection: Protection = DEFAULT,
    progress: Progress = silent,
) -> HeadSet:
    """Return a head set with what its own betas do to validation examples.

    Args:
        model: The model.
        head_set: The head set.
        validation: The examples, of which those that the model knows are used.
        method: Whose betas to measure.
        protection: What steering should leave alone.
        progress: Reports how many prompts are answered.

    Raises:
        ExampleError: No example can be used.
    """
    model = model.in_form_of(head_set)
    examples = usable_validation(model, validation, head_set.target)
    steered = model.resolve(Steer(target=head_set.target, head_set=head_set, method=method))
    tried = {True: steered, False: unsteered()}
    description = f"measuring {head_set.name}"
    trials = Trials(model, examples, head_set.target, tried, description, progress)
    gate, side_effects = measured_gate(model, head_set, method, examples, protection, progress)
    measured = _with_validation(head_set, method, trials, True, False, side_effects)
    return measured.with_gate(method, gate)


def _with_validation(
    head_set: HeadSet,
    method: Method,
    trials: Trials[Choice],
    best: Choice,
    base: Choice,
    side_effects: dict[str, tuple[float, float]],
) -> HeadSet:
    gains = trials.gains(best, base)
    found = Validation(
        n_examples=len(gains),
        accuracy=dict(trials.outcome(best).accuracy),
        accuracy_unsteered=dict(trials.outcome(base).accuracy),
        gain=fmean(gains),
        gain_interval=difference_interval(gains),
        side_effects=side_effects,
    )
    return head_set.with_metrics({f"validation_{method}": found.model_dump()})


def tune_all(
    model: SteeredModel,
    candidates: dict[Target, list[HeadSet]],
    validation: Sequence[ConflictExample],
    *,
    methods: Sequence[Method],
    grid: bool,
    protection: Protection,
    progress: Progress,
    unfinished: Unfinished | None = None,
) -> dict[Target, HeadSet]:
    """Choose and tune a head set for every target.

    Where no validation example can be used, warns and leaves the first candidate untuned.

    Args:
        model: The model.
        candidates: The head sets to choose from, by target.
        validation: The examples to choose and tune on.
        methods: The methods whose betas to tune; the first chooses.
        grid: Whether to try every pair of the paper's grid.
        protection: What steering should leave alone.
        progress: Reports how many prompts are read and answered.
        unfinished: Keeps what is tuned, and does not tune it again.
    """
    unfinished, tuned = unfinished or Unfinished(), {}
    for target, own in candidates.items():
        tuned[target] = own[0]
        for method in methods:
            key = f"tuned {target} {method}"
            if (kept := unfinished.get(key)) is not None:
                found = HeadSet.parse(kept, key)
                tuned[target] = found.model_copy(update={"scores": own[0].scores})
                continue
            try:
                tuned[target] = choose(
                    model,
                    own if method == methods[0] else [tuned[target]],
                    validation,
                    method=method,
                    grid=grid,
                    protection=protection,
                    progress=progress,
                )
            except ExampleError as error:
                warnings.warn(
                    f"betas of {tuned[target].name!r} ({method}) stay untuned: {error}",
                    stacklevel=2,
                )
                continue
            unfinished.put(key, tuned[target].model_dump(mode="json"))
    return tuned
