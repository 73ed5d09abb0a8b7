"""The choices of validation: what a method gets in each domain, and the treatment that follows.

A choice is plain data: the betas of the paper's heads, the heads that PH3 prunes, else nothing. A
domain with fewer than five validation examples uses those of all domains. Without any, a head set
keeps its own betas and PH3 prunes five heads. The choice records what it was tuned on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from juice.data.example import ConflictExample, judged_types
from juice.engine.steer import Steer
from juice.errors import JuiceError
from juice.evaluation import path_patching
from juice.evaluation.head_sets import HeadSets, finders
from juice.evaluation.methods import CONTRAST_STRENGTH, RECIPES, UNSTEERED, Recipe, Treatment
from juice.evaluation.options import MethodName
from juice.evaluation.splits import Splits, domain_of
from juice.formula import CONFLICTS, ConflictType, Target
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Head
from juice.identification.options import IdentificationOptions
from juice.identification.outcomes import Trials
from juice.identification.tune import best_betas, grid_of, try_betas
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

N_PRUNED = (1, 3, 5, 7, 9, 15)
N_PRUNED_UNTUNED = 5
N_OWN = 5
Choice = dict[str, Any]


class MethodUnavailableError(JuiceError):
    """A method cannot be used on this model or data; the report gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Preparer:
    """Prepares methods for one model, its splits and the head sets by part and target."""

    model: SteeredModel
    splits: Splits
    head_sets: HeadSets
    options: IdentificationOptions
    progress: Progress = silent

    def choose(self, name: MethodName, target: Target) -> dict[str, Choice]:
        """Return the choice of validation for every domain.

        Raises MethodUnavailableError with the reason.
        """
        recipe = RECIPES[name]
        if recipe.tunes:
            return self._betas(recipe, target)
        if recipe.prunes:
            return self._pruned(self._patched(name, target), target)
        if recipe.part is not None:
            self._check_offers(recipe, target)
        treatment = self._treatment(recipe, target, {})
        if not any(map(treatment.applies, self.splits.test)):
            raise MethodUnavailableError(
                "it needs the context apart from the question; give `question` in the examples"
            )
        return {domain: {} for domain in self.splits.domains}

    def _patched(self, name: MethodName, target: Target) -> Sequence[ConflictExample]:
        """Return the examples that PH3 finds its heads on."""
        if name == "ph3_large":
            return self.splits.large
        try:
            return finders(self.model, self.splits, target, self.options)
        except JuiceError as error:
            raise MethodUnavailableError(str(error)) from error

    def treatments(
        self, name: MethodName, target: Target, choices: Mapping[str, Choice]
    ) -> dict[str, Treatment]:
        """Return the treatments that follow from what was chosen."""
        return {domain: self._treatment(RECIPES[name], target, c) for domain, c in choices.items()}

    def _treatment(self, recipe: Recipe, target: Target, choice: Choice) -> Treatment:
        steer = UNSTEERED
        if recipe.part is not None:
            steer = Steer(
                target=target,
                head_set=self._head_set(recipe, target),
                beta_plus=choice.get("beta_plus"),
                beta_minus=choice.get("beta_minus"),
                method=recipe.method,
                gate="auto" if recipe.is_gated else None,
                positions=recipe.positions,
            )
        elif recipe.prunes:
            steer = pruning(self.model, [Head(*head) for head in choice["heads"]], target)
        elif recipe.contrast is not None:
            steer = Steer(target=target, method=recipe.contrast, strength=CONTRAST_STRENGTH)
        return Treatment(target=target, steer=steer, instructs=recipe.instructs, apart=recipe.apart)

    def _head_set(self, recipe: Recipe, target: Target) -> HeadSet:
        assert recipe.part is not None, "the method scales the heads of a set"
        if (head_set := self.head_sets[recipe.part].get(target)) is None:
            raise MethodUnavailableError(f"no heads toward the {target} answer; see the notes")
        return head_set

    def _check_offers(self, recipe: Recipe, target: Target) -> None:
        """Raise MethodUnavailableError where a head set lacks what a method needs of it."""
        head_set = self._head_set(recipe, target)
        method, named = recipe.method or head_set.method, f"the gate of {head_set.name!r}"
        if head_set.betas(method) is None:
            raise MethodUnavailableError(f"{head_set.name!r} has no betas for {method}")
        if not recipe.is_gated:
            return
        gate = head_set.gate()
        if gate is None:
            raise MethodUnavailableError(f"{head_set.name!r} has no gate")
        if gate.chat_template_sha256 != self.model.prompts.sha256:
            raise MethodUnavailableError(f"{named} was measured on prompts of another form")
        signals = {rule.signal for rule in gate.rules}
        if recipe.apart and "memory" not in signals:
            raise MethodUnavailableError(f"{named} decides alike with the context apart")
        if not recipe.apart and signals == {"memory"}:
            raise MethodUnavailableError(f"{named} needs the context apart")

    def _in_each_domain(
        self, choose: Callable[[Sequence[int]], Choice], target: Target
    ) -> dict[str, Choice]:
        """Choose on the indices of each domain's validation examples, else on all of them."""
        every, chosen = self.splits.validation, dict[str, Choice]()
        fallback = [*range(len(every))] if every and judged_types(target, every) else []
        for domain in self.splits.domains:
            places = [i for i, e in enumerate(every) if domain_of(e) == domain]
            tuned_on: str | None = domain
            if len(places) < N_OWN or not judged_types(target, [every[i] for i in places]):
                places, tuned_on = fallback, "all domains" if fallback else None
            found = {"tuned_on": tuned_on, "n_validation": len(places)}
            chosen[domain] = {**choose(places), **found}
        return chosen

    def _betas(self, recipe: Recipe, target: Target) -> dict[str, Choice]:
        head_set = self._head_set(recipe, target)
        method = recipe.method or head_set.method
        if method not in head_set.methods.given:
            raise MethodUnavailableError(f"{head_set.name!r} has no heads for {method}")
        pairs, validation = grid_of(head_set, method), self.splits.validation
        trials = try_betas(self.model, head_set, validation, method, self.progress, pairs)

        def choose(among: Sequence[int]) -> Choice:
            if among:
                plus, minus = best_betas(trials, pairs, among)
                return {"beta_plus": plus, "beta_minus": minus}
            betas = head_set.betas(method)
            if betas is None:
                raise MethodUnavailableError(
                    f"{head_set.name!r} has no betas for {method} and no validation example can be "
                    "used to tune them"
                )
            return {"beta_plus": betas.plus, "beta_minus": betas.minus}

        return self._in_each_domain(choose, target)

    def _pruned(self, examples: Sequence[ConflictExample], target: Target) -> dict[str, Choice]:
        conflict_type, made = patched_type(examples), []
        try:
            if conflict_type:
                seed = self.options.seed
                made = path_patching.patches(self.model, examples, conflict_type, seed)
            scores = path_patching.patching_scores(self.model, made, self.progress)
        except JuiceError as error:
            raise MethodUnavailableError(str(error)) from error
        ranked = path_patching.ranked(scores)
        # Context heads come first, memory heads last; those that pull the other way are pruned.
        opposing = ranked if target == "parametric" else ranked[::-1]
        tried = {n: self.model.resolve(pruning(self.model, opposing[:n], target)) for n in N_PRUNED}
        validation, description = self.splits.validation, "tuning how many heads to prune"
        trials = Trials(self.model, validation, target, tried, description, self.progress)

        def choose(among: Sequence[int]) -> Choice:
            n = N_PRUNED_UNTUNED
            if among:
                n = max(N_PRUNED, key=lambda n: (trials.outcome(n, among).rank, -n))
            return {"heads": [list(head) for head in opposing[:n]], "n_patched": len(made)}

        return self._in_each_domain(choose, target)


def patched_type(examples: Sequence[ConflictExample]) -> ConflictType | None:
    """Return the conflict type for path patching: the one that most examples have; None for none.

    A tie goes to substitution, as in PH3.
    """
    counts = {t: sum(t in e.prompts for e in examples) for t in CONFLICTS}
    best = max(CONFLICTS, key=lambda t: counts[t])
    return best if counts[best] else None


def pruning(model: SteeredModel, heads: Sequence[Head], target: Target) -> Steer:
    """Return the steering that removes heads in a single run: z_h <- z_h - z_h."""
    head_set = model.make_head_set(
        name="ph3", target=target, minus=heads, beta_minus=-1.0, method="june"
    )
    return Steer(target=target, head_set=head_set, method="june")
