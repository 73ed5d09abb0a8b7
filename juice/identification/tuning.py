"""The betas (method.md, stage 2): the pair of the grid with the best accuracy on a validation set.

Every pair of beta_plus in {0 ... 5} and beta_minus in {0 ... -3} steers the whole validation set; the best sum of
accuracies over the target's conflict types wins, ties by the mean p_y, then by the gentler pair. A sign without heads is
not varied. Validation examples are those whose clean prompt this model answers right.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

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


Requests = dict[ConflictType, list[GenerationRequest]]
Answers = dict[ConflictType, list[Completion]]


def scoring_requests(
    model: SteeredModel, examples: Sequence[ConflictExample], conflict_types: Sequence[ConflictType], target: Target
) -> Requests:
    """Return unsteered requests for the scored tokens of every example; they watch the first token of the target's answer."""
    requests: Requests = {conflict_type: [] for conflict_type in conflict_types}
    for conflict_type, example in product(conflict_types, examples):
        prompt = example.prompts[conflict_type]
        token = model.loaded.first_token(prompt, example.answer(target))
        requests[conflict_type].append(model.request(prompt, max_tokens=MAX_TOKENS, watch=() if token is None else (token,)))
    return requests


def answer(model: SteeredModel, requests: Requests, steering: Steering | None = None) -> Answers:
    """Generate for all requests in one go, steered or not."""
    every = [request for own in requests.values() for request in own]
    completions = iter(model.engine.generate([r.with_steering(steering) for r in every] if steering else every))
    return {conflict_type: [next(completions) for _ in own] for conflict_type, own in requests.items()}


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
    completions = answer(model, scoring_requests(model, asked, ("clean",), "parametric"))["clean"]
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
    """Return the head set with the best betas of a method and what they did; raises ExampleError without usable examples."""
    target = head_set.target
    examples, conflict_types = usable_validation(model, validation, target)
    grid = list(product(GRID_PLUS if head_set.heads.plus else (0.0,), GRID_MINUS if head_set.heads.minus else (0.0,)))
    requests = scoring_requests(model, examples, conflict_types, target)
    outcomes: dict[tuple[float, float], Outcome] = {}
    with progress(f"tuning {head_set.name} betas", len(grid)) as advance:
        for plus, minus in grid:
            steer = Steer(target=target, beta_plus=plus, beta_minus=minus, method=method)
            outcomes[plus, minus] = outcome(examples, answer(model, requests, model.steering(steer, head_set)), target)
            advance(1)
    best = max(grid, key=lambda pair: (*outcomes[pair].rank, -(pair[0] - pair[1])))
    metrics = {
        f"validation_{method}": {
            "n_examples": len(examples),
            "accuracy": outcomes[best].accuracy,
            "accuracy_unsteered": outcomes[0.0, 0.0].accuracy,
        }
    }
    return head_set.with_betas(method, Betas(plus=best[0], minus=best[1]), metrics)
