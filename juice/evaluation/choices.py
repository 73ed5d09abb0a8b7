"""What validation chooses for a method in each domain, and the treatment that follows from it.

A choice is plain data:

    juice, june          the betas
    ph3_large, _small    how many of the heads that pull the other way are pruned, and which ones
    others               nothing: served and learned head sets have betas of their own

A domain with fewer than five validation examples uses those of all domains. Without any, a head set
keeps its own betas and PH3 prunes five heads. The choice records what it was tuned on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from juice.data.example import ConflictExample, judged_types
from juice.engine import Steer
from juice.errors import JuiceError
from juice.evaluation import path_patching
from juice.evaluation.head_sets import PART_OF, HeadSets, finders
from juice.evaluation.methods import CAD_WEIGHT, MethodName, Treatment
from juice.evaluation.splits import Splits, domain_of
from juice.head_set import Head, HeadSet
from juice.identification import IdentificationOptions
from juice.identification.grid import best_betas, grid_of, try_betas
from juice.identification.trials import Trials
from juice.methods import CONFLICTS, ConflictType, Method, Target
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
    seed: int = 0
    progress: Progress = silent

    def choose(self, name: MethodName, target: Target) -> dict[str, Choice]:
        """Return what validation chooses for every domain.

        Raises MethodUnavailableError with the reason.
        """
        if name in ("juice", "june"):
            return self._betas(name, target)
        if name in ("ph3_large", "ph3_small"):
            return self._pruned(self._patched(name, target), target)
        if name in PART_OF:
            self._check_offers(name, target)
        treatment = self._treatment(name, target, {})
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
        return {domain: self._treatment(name, target, choice) for domain, choice in choices.items()}

    def _treatment(self, name: MethodName, target: Target, choice: Choice) -> Treatment:
        if name in PART_OF:
            steer = Steer(
                target=target,
                head_set=self._head_set(name, target),
                beta_plus=choice.get("beta_plus"),
                beta_minus=choice.get("beta_minus"),
                method="june" if name in ("june", "served_once") else "juice",
                gate="auto" if name in ("gated", "gated_apart") else None,
                positions="question" if name == "question" else "all",
            )
            return Treatment(target=target, steer=steer, apart=name in ("question", "gated_apart"))
        if name in ("ph3_large", "ph3_small"):
            heads = [Head(*head) for head in choice["heads"]]
            return Treatment(target=target, steer=pruning(self.model, heads, target))
        if name in ("cad", "adacad"):
            steer = Steer(target=target, method=name, strength=CAD_WEIGHT)
            return Treatment(target=target, steer=steer, apart=True)
        return Treatment(target=target, instructs=name == "prompt")

    def _head_set(self, name: MethodName, target: Target) -> HeadSet:
        head_set = self.head_sets[PART_OF[name]].get(target)
        if head_set is None:
            raise MethodUnavailableError(f"no heads toward the {target} answer; see the notes")
        return head_set

    def _check_offers(self, name: MethodName, target: Target) -> None:
        """Raise MethodUnavailableError where a head set lacks what a method needs of it."""
        head_set = self._head_set(name, target)
        method: Method = "june" if name == "served_once" else "juice"
        gate, is_gated = head_set.gate(), name in ("gated", "gated_apart")
        signals = {rule.signal for rule in gate.rules} if gate else set()
        if head_set.betas(method) is None:
            raise MethodUnavailableError(f"{head_set.name!r} has no betas for {method}")
        if is_gated and gate is None:
            raise MethodUnavailableError(f"{head_set.name!r} has no gate")
        if is_gated and gate and gate.chat_template_sha256 != self.model.prompts.sha256:
            raise MethodUnavailableError(
                f"the gate of {head_set.name!r} was measured on prompts of another form"
            )
        if name == "gated" and signals == {"memory"}:
            raise MethodUnavailableError(f"the gate of {head_set.name!r} needs the context apart")
        if name == "gated_apart" and "memory" not in signals:
            raise MethodUnavailableError(
                f"the gate of {head_set.name!r} decides alike with the context apart"
            )

    def _in_each_domain(
        self, choose: Callable[[Sequence[int]], Choice], target: Target
    ) -> dict[str, Choice]:
        """Choose on the indices of each domain's own validation examples, else on all of them."""
        every, chosen = self.splits.validation, dict[str, Choice]()
        for domain in self.splits.domains:
            own = [i for i, e in enumerate(every) if domain_of(e) == domain]
            if len(own) >= N_OWN and judged_types(target, [every[i] for i in own]):
                chosen[domain] = {**choose(own), "tuned_on": domain, "n_validation": len(own)}
            else:
                on_all = bool(every) and bool(judged_types(target, every))
                own = list(range(len(every))) if on_all else []
                chosen[domain] = {
                    **choose(own),
                    "tuned_on": "all domains" if own else None,
                    "n_validation": len(own),
                }
        return chosen

    def _betas(self, method: Method, target: Target) -> dict[str, Choice]:
        head_set = self._head_set(method, target)
        pairs = grid_of(head_set)
        trials = try_betas(
            self.model, head_set, self.splits.validation, method, self.progress, pairs
        )

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
        conflict_type = patched_type(examples)
        try:
            made = (
                path_patching.patches(self.model, examples, conflict_type, self.seed)
                if conflict_type
                else []
            )
            ranked = path_patching.ranked(
                path_patching.patching_scores(self.model, made, self.progress)
            )
        except JuiceError as error:
            raise MethodUnavailableError(str(error)) from error
        # Context heads come first, memory heads last; those that pull the other way are pruned.
        opposing = ranked if target == "parametric" else ranked[::-1]

        steerings = {
            n: self.model.resolve(pruning(self.model, opposing[:n], target)) for n in N_PRUNED
        }
        trials = Trials(
            self.model,
            self.splits.validation,
            target,
            steerings,
            "tuning how many heads to prune",
            self.progress,
        )

        def choose(among: Sequence[int]) -> Choice:
            n = (
                max(N_PRUNED, key=lambda n: (trials.outcome(n, among).rank, -n))
                if among
                else N_PRUNED_UNTUNED
            )
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
    """Return what removes heads in a single run: z_h <- z_h - z_h."""
    head_set = model.make_head_set(
        name="ph3", target=target, minus=heads, beta_minus=-1.0, method="june"
    )
    return Steer(target=target, head_set=head_set, method="june")
