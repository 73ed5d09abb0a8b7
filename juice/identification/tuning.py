"""The betas (method.md, stage 2): the pair of the grid with the best accuracy on a validation set.

Every pair of beta_plus in {0 ... 5} and beta_minus in {0 ... -3} steers the whole validation set, all pairs in one go; the best
sum of accuracies over the target's conflict types wins, ties by the mean p_y, then by the gentler pair. A sign without heads
is not varied. Validation examples are those whose clean prompt this model answers right.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Generic, TypeVar

from juice.asking import ask_all
from juice.engine import Completion, GenerationRequest, Steer, Steering
from juice.errors import ExampleError
from juice.examples import CONFLICT_TYPES, ConflictExample, ConflictType, Target
from juice.head_set import Betas, HeadSet
from juice.head_set.schema import Method
from juice.progress import Progress, silent
from juice.scoring import MAX_TOKENS, is_correct
from juice.steered_model import SteeredModel

N_FEW = 20
GRID_PLUS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
GRID_MINUS = (0.0, -1.0, -2.0, -3.0)


@dataclass(frozen=True)
class Outcome:
    """What one way of steering did to the examples: accuracy and mean p_y by conflict type."""

    accuracy: dict[ConflictType, float]
    p_answer: dict[ConflictType, float]

    @property
    def rank(self) -> tuple[float, float]:
        """Order outcomes: sum of accuracies, then mean p_y."""
        return round(sum(self.accuracy.values()), 9), sum(self.p_answer.values()) / len(self.p_answer)


def conflict_types_of(target: Target, examples: Sequence[ConflictExample]) -> tuple[ConflictType, ...]:
    """Return the conflict types a target is judged on, among those that every example has; `clean` is not for context."""
    return tuple(t for t in CONFLICT_TYPES if all(t in e.prompts for e in examples) and (t != "clean" or target == "parametric"))


Answers = dict[ConflictType, list[Completion]]
Choice = TypeVar("Choice", bound=Hashable)


def scoring_request(
    model: SteeredModel, example: ConflictExample, conflict_type: ConflictType, target: Target, steering: Steering | None = None
) -> GenerationRequest:
    """Return the request for an example's scored tokens; it watches the first token of the target's answer."""
    prompt = example.prompts[conflict_type]
    token = model.loaded.prompts.first_token(prompt, example.answer(target))
    request = model.request(prompt, max_tokens=MAX_TOKENS, watch=() if token is None else (token,))
    return request if steering is None else request.with_steering(steering)


def answer(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    conflict_types: Sequence[ConflictType],
    target: Target,
    steering: Steering | None = None,
) -> Answers:
    """Generate for all examples in one go, steered or not."""
    requests = [scoring_request(model, e, t, target, steering) for t in conflict_types for e in examples]
    completions = iter(model.engine.generate(requests))
    return {conflict_type: [next(completions) for _ in examples] for conflict_type in conflict_types}


class Trials(Generic[Choice]):
    """What every one of several ways of steering does to validation examples, asked in one go."""

    def __init__(
        self,
        model: SteeredModel,
        examples: Sequence[ConflictExample],
        target: Target,
        steerings: Mapping[Choice, Steering],
        said: str,
        progress: Progress = silent,
    ) -> None:
        self._examples = examples
        self._target: Target = target
        judged = [t for t in CONFLICT_TYPES if t != "clean" or target == "parametric"]
        asked = [(t, i) for t in judged for i, e in enumerate(examples) if t in e.prompts]
        unsteered = {at: scoring_request(model, examples[at[1]], at[0], target) for at in asked}
        # The same prompt under all ways of steering, side by side: equally long rows need no padding.
        keys = [(at, choice) for at in asked for choice in steerings]
        requests = [unsteered[at].with_steering(steerings[choice]) for at, choice in keys]
        self._completions = dict(zip(keys, ask_all(model, requests, said, progress), strict=True))

    def outcome(self, choice: Choice, among: Sequence[int] | None = None) -> Outcome:
        """Return what a choice did to some of the examples, by their indices."""
        chosen = range(len(self._examples)) if among is None else among
        own = [self._examples[i] for i in chosen]
        answers = {t: [self._completions[(t, i), choice] for i in chosen] for t in conflict_types_of(self._target, own)}
        return outcome(own, answers, self._target)


def outcome(examples: Sequence[ConflictExample], answers: Answers, target: Target) -> Outcome:
    """Score answers, each by its example's own rule."""
    accuracy, p_answer = {}, {}
    for conflict_type, completions in answers.items():
        hits = [is_correct(c.text, e.accepted(target), e.match) for c, e in zip(completions, examples, strict=True)]
        accuracy[conflict_type] = sum(hits) / len(hits)
        p_answer[conflict_type] = sum(math.exp(c.watched[0]) if c.watched else 0.0 for c in completions) / len(completions)
    return Outcome(accuracy, p_answer)


def known_examples(model: SteeredModel, examples: Sequence[ConflictExample]) -> list[ConflictExample]:
    """Keep the examples whose clean prompt the unsteered model answers right, and those without one."""
    asked = [e for e in examples if "clean" in e.prompts]
    completions = answer(model, asked, ("clean",), "parametric")["clean"]
    wrong = {id(e) for e, c in zip(asked, completions, strict=True) if not is_correct(c.text, e.parametric_answer, e.match)}
    return [e for e in examples if id(e) not in wrong]


def fitting_examples(model: SteeredModel, examples: Sequence[ConflictExample]) -> list[ConflictExample]:
    """Keep the examples whose prompts leave room for the scored tokens in the model's context."""
    limit = model.loaded.max_positions or math.inf
    return [e for e in examples if all(len(model.tokenize(p)) + MAX_TOKENS <= limit for p in e.prompts.values())]


def usable_validation(
    model: SteeredModel, validation: Sequence[ConflictExample], target: Target
) -> tuple[list[ConflictExample], tuple[ConflictType, ...]]:
    """Return the validation examples that can be used and the conflict types a target is judged on.

    Warns of what is left out and of too few; raises ExampleError when none is left.
    """
    if not validation:
        raise ExampleError("no examples are left to tune the betas on; give more examples, or a file with --validation")
    wanted = {t for e in validation for t in e.prompts}
    complete = [e for e in validation if wanted <= e.prompts.keys()]
    if n_partial := len(validation) - len(complete):
        warnings.warn(f"{n_partial} validation examples lack a prompt that others have and are left out", stacklevel=3)
    examples = known_examples(model, fitting_examples(model, complete))
    conflict_types = conflict_types_of(target, examples)
    if not examples or not conflict_types:
        raise ExampleError(
            f"none of {len(validation)} validation examples can be used: the model answers none of their clean prompts, or they share "
            f"no conflict type for {target}; give others with --validation"
        )
    if len(examples) < N_FEW:
        warnings.warn(f"only {len(examples)} examples tune the betas: they may fit nothing else; {N_FEW} or more are better", stacklevel=3)
    return examples, conflict_types


def tune(
    model: SteeredModel,
    head_set: HeadSet,
    validation: Sequence[ConflictExample],
    *,
    method: Method = "juice",
    progress: Progress = silent,
) -> HeadSet:
    """Return the head set with the best betas of a method and what they did, in the form of prompt in which its heads were found.

    Raises ExampleError without usable examples, UsageError for a model that takes another form.
    """
    model, target = model.in_form_of(head_set), head_set.target
    examples, _ = usable_validation(model, validation, target)
    trials = try_betas(model, head_set, examples, method, progress)
    best = best_betas(head_set, trials)
    outcomes = {"accuracy": trials.outcome(best).accuracy, "accuracy_unsteered": trials.outcome((0.0, 0.0)).accuracy}
    metrics = {f"validation_{method}": {"n_examples": len(examples), **outcomes}}
    if head_set.model.fingerprint is None:
        # Betas are tuned on these weights: the set is theirs from now on.
        head_set = head_set.model_copy(update={"model": model.loaded.identity})
    return head_set.with_betas(method, Betas(plus=best[0], minus=best[1]), metrics)


def try_betas(
    model: SteeredModel, head_set: HeadSet, examples: Sequence[ConflictExample], method: Method, progress: Progress = silent
) -> Trials[tuple[float, float]]:
    """Steer the examples with every pair of betas of the grid."""

    def steering(pair: tuple[float, float]) -> Steering:
        return model.steering(Steer(target=head_set.target, beta_plus=pair[0], beta_minus=pair[1], method=method), head_set)

    said = f"tuning {head_set.name} betas"
    return Trials(model, examples, head_set.target, {pair: steering(pair) for pair in grid_of(head_set)}, said, progress)


def grid_of(head_set: HeadSet) -> list[tuple[float, float]]:
    """Return the pairs of betas that are tried."""
    return list(product(GRID_PLUS if head_set.heads.plus else (0.0,), GRID_MINUS if head_set.heads.minus else (0.0,)))


def best_betas(head_set: HeadSet, trials: Trials[tuple[float, float]], among: Sequence[int] | None = None) -> tuple[float, float]:
    """Return the pair that did best on some of the examples."""
    return max(grid_of(head_set), key=lambda pair: (*trials.outcome(pair, among).rank, -(pair[0] - pair[1])))
