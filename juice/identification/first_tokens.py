"""The first new tokens of prompts under any steering: a prefill each, outside the engine.

Of each group of prompts it gives how often the likeliest token is the right answer's first, and how
far that one leads: its probability against that of the likeliest other token, p / (p + other),
which is one half at a tie. The second moves with every step of a search, the first seldom.

Among the prompts are those that steering should leave alone, made from the user's examples:

    unknown     the context is all there is: a conflict's prompt about a subject that does not exist
    clean       there is no context: the clean prompt
    true        the context says what the model remembers
    irrelevant  the context is about another subject

Steering toward memory endangers the first, and when strong all; toward the context the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from juice.data.example import (
    ConflictExample,
    context_end,
    irrelevant_contexts,
    is_about_something,
    prompt_alone,
    true_contexts,
    unknown_subjects,
)
from juice.engine.steer import Steering
from juice.formula import CONFLICTS, OTHER, Method, Target
from juice.identification.attribution import DualRun, micro_batches
from juice.identification.options import Protected
from juice.model.loaded import LoadedModel
from juice.progress import Progress
from juice.steered_model import SteeredModel

MOST_KEPT = 2 << 30  # bytes, of clean z that is kept between readings
# What examples lack of which no prompt of a kind can be made.
UNPROTECTED: dict[Protected, str] = {
    "unknown": "no example has its subject word for word in each of its conflict prompts",
    "clean": "no example has one",
    "true": "no example has its context answer word for word in each of its conflict prompts",
    "irrelevant": "no example has a prompt that ends in its question or clean prompt, to be put "
    "behind another's context",
}
# The tokens of a prompt, and the first token of its right answer.
Asked = tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class Reading:
    """The mean over the prompts of each group: whether the answer is right, and its lead."""

    right: dict[str, float]
    lead: dict[str, float]

    def score(self, group: str) -> float:
        """Return the mean of the two: what counts, and what moves with every step."""
        return (self.right[group] + self.lead[group]) / 2


class FirstTokens:
    """Groups of prompts that are read under many ways of steering; clean runs are kept if small."""

    def __init__(self, loaded: LoadedModel, groups: Mapping[str, Sequence[Asked]]) -> None:
        self._loaded = loaded
        self._asked = [(name, *asked) for name, prompts in groups.items() for asked in prompts]
        lengths = [len(ids) for _, ids, _ in self._asked]
        self._runs = [
            (batch, DualRun(loaded, [self._asked[i][1] for i in batch]))
            for batch in micro_batches(lengths, loaded.rope_switch)
        ]
        self._keeps = may_keep(loaded, sum(lengths))

    def read(
        self, steerings: Sequence[Steering], progress: Progress, description: str
    ) -> list[Reading]:
        """Read all prompts under each way of steering."""
        loaded, n = self._loaded, len(self._asked)
        ways = [(table_of(loaded, one).to(loaded.device), method_of(one)) for one in steerings]
        answers = torch.tensor([token for *_, token in self._asked], device=loaded.device)
        right, lead = torch.zeros(2, len(ways), n, dtype=torch.float64)  # [steering, prompt]
        with torch.inference_mode(), progress(description, len(ways) * n) as advance:
            for batch, run in self._runs:
                with loaded.turn:
                    for i, (table, method) in enumerate(ways):
                        logits = _logits(run, table, method)
                        tokens = answers[batch][:, None]
                        answer = logits.gather(1, tokens)
                        other = logits.scatter(1, tokens, -torch.inf).amax(1, keepdim=True)
                        right[i, batch] = (answer > other)[:, 0].cpu().double()
                        ahead = (answer - other).sigmoid().nan_to_num(0.0)  # activations overflow
                        lead[i, batch] = ahead[:, 0].cpu().double()
                        advance(len(batch))
                    if not self._keeps:
                        run.forget()
        places: dict[str, list[int]] = {}
        for i, (name, *_) in enumerate(self._asked):
            places.setdefault(name, []).append(i)

        def means(values: torch.Tensor) -> dict[str, float]:
            return {name: float(values[at].mean()) for name, at in places.items()}

        return [Reading(means(right[i]), means(lead[i])) for i in range(len(ways))]


def may_keep(loaded: LoadedModel, n_tokens: int) -> bool:
    """Return whether the clean z of so many tokens may be kept between readings."""
    width = sum(layer.n_heads * layer.d_head for layer in loaded.layout.layers)
    return n_tokens * width * loaded.dtype.itemsize <= MOST_KEPT


def _logits(run: DualRun, table: torch.Tensor, method: Method) -> torch.Tensor:
    if not table.any():
        return run.record()
    if method == "juice" and not run.is_recorded:
        run.record()
    with run.steered(table, method):
        return run.logits()


def table_of(loaded: LoadedModel, steering: Steering) -> torch.Tensor:
    """Return the coefficients of a way of steering, float32 [n_layers, n_heads]."""
    table = torch.zeros(loaded.layout.n_layers, loaded.layout.n_heads)
    for layer, of_heads in steering.coefficients.items():
        table[layer, : len(of_heads)] = of_heads
    return table


def method_of(steering: Steering) -> Method:
    """Return the runs of a way of steering that is not a contrast."""
    return "june" if steering.report.method == "june" else "juice"


class Case(NamedTuple):
    """A prompt of an example, whose answer to it is right, and the prompt without its context."""

    prompt: str
    example: ConflictExample
    answer: Target
    alone: str | None = None


def conflict_prompts(
    model: SteeredModel, target: Target, examples: Sequence[ConflictExample]
) -> dict[str, list[Asked]]:
    """Return the prompts with a conflict by its type, with the answers of a target."""
    cases: dict[str, list[Case]] = {
        t: [Case(e.prompts[t], e, target) for e in examples if t in e.prompts] for t in CONFLICTS
    }
    return asked_of(model, cases)


def protected_prompts(
    model: SteeredModel,
    target: Target,
    examples: Sequence[ConflictExample],
    kinds: Sequence[Protected],
) -> dict[str, list[Asked]]:
    """Return the prompts of some kinds that steering toward a target endangers, with their answers.

    Kinds that the target does not endanger, or that cannot be made of the examples, are left out.
    It warns of the latter where the examples have names, of which such prompts are made.
    """
    endangered = endangered_prompts(target, examples)
    named = [e for e in examples if is_about_something(e) and set(e.prompts) - {"clean"}]
    known = [e for e in named if e.parametric_answer]
    # One example alone has no other's context, which says nothing of how it is written.
    is_parted = any(context_end(e, t) for e in known for t in CONFLICTS if t in e.prompts)
    expected: dict[Protected, Sequence[ConflictExample]] = {
        "unknown": named if target == "parametric" else (),
        "clean": known,
        "true": known,
        "irrelevant": () if is_parted else known,
    }
    lacking = [k for k, of in expected.items() if of and k in kinds and k not in endangered]
    if lacking:
        reasons = "; ".join(f"{kind} prompts: {UNPROTECTED[kind]}" for kind in lacking)
        warnings.warn(
            f"nothing keeps steering toward {target} from breaking {reasons}. Write the examples "
            "so, or leave these kinds out of --protect",
            stacklevel=1,  # the same place each time, so that it is said once
        )
    return asked_of(model, {kind: endangered[kind] for kind in endangered if kind in kinds})


def asked_of(model: SteeredModel, groups: Mapping[str, Sequence[Case]]) -> dict[str, list[Asked]]:
    """Return the tokens of each prompt and the first one of its answer, by group.

    Where the example's other answer begins alike, what they share is the prompt's. Answers without
    a token of their own are left out, and groups without a prompt.
    """
    asked = {
        group: [one for case in cases if (one := _asked(model, case)) is not None]
        for group, cases in groups.items()
    }
    return {group: found for group, found in asked.items() if found}


def _asked(model: SteeredModel, case: Case) -> Asked | None:
    prompt, opening = case.prompt, case.example.opening
    answers = (case.example.answer(case.answer), case.example.answer(OTHER[case.answer]))
    first, others = (model.first_token(prompt, answer, opening=opening) for answer in answers)
    if first is None:
        return None
    if first == others and (parted := model.prompts.parted(prompt, answers, opening)) is not None:
        ids, (first, _) = parted
        return ids, first
    return model.prompts.tokens(prompt, opening), first


def endangered_prompts(
    target: Target, examples: Sequence[ConflictExample]
) -> dict[str, list[Case]]:
    """Return the prompts that steering toward a target endangers, by kind; none for no prompt."""
    nobody = unknown_subjects(examples, seed=0) if target == "parametric" else ()
    clean = ((e.prompts["clean"], e) for e in examples if "clean" in e.prompts)
    made = {
        "unknown": list(_one_conflict_each(nobody, "context")),
        "clean": [Case(prompt, e, "parametric", alone=prompt) for prompt, e in clean],
        "true": list(_one_conflict_each(true_contexts(examples), "parametric")),
        "irrelevant": list(_one_conflict_each(irrelevant_contexts(examples), "parametric")),
    }
    return {kind: cases for kind, cases in made.items() if cases}


def _one_conflict_each(examples: Sequence[ConflictExample], answer: Target) -> Iterator[Case]:
    """Yield a prompt with a context of each example, of the conflict types in turn."""
    for i, example in enumerate(examples):
        conflicts = [t for t in CONFLICTS if t in example.prompts]
        conflict = conflicts[i % len(conflicts)]
        yield Case(example.prompts[conflict], example, answer, prompt_alone(example, conflict))
