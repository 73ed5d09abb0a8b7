"""The gate of a tuned head set, measured on validation examples (docs/method.md, "Gates").

Where the signals of prompts with a conflict lie above those of the prompts that steering endangers
most, the threshold is half way between them. Otherwise it is the lowest of four low quantiles of
the conflicts' signal that breaks at most 5 % of the other answers. A rule that shuts out too many
conflicts, or does harm all the same, is dropped. Irrelevant contexts do not count as harm here,
since no signal tells them from false ones; what becomes of them is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from juice.data.example import ConflictExample, judged_types, prompt_alone
from juice.engine.answer import Completion
from juice.engine.request import Request, value_of
from juice.engine.steer import Steer
from juice.formula import Method, Target
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Gate, GateRule, Signal
from juice.identification.first_tokens import Case, endangered_prompts
from juice.identification.options import Protected
from juice.progress import Progress
from juice.steered_model import SteeredModel

N_MEASURED = 30
SIGNALS: dict[Target, tuple[Signal, ...]] = {
    "parametric": ("memory", "steered"),
    "context": ("copied",),
}
QUANTILES, TAIL = (0.0, 0.02, 0.05, 0.1), 0.02
LEAST_KEPT = 0.9
NEGLIGIBLE, MOST_LOST = 0.05, 0.1


def measured_gate(
    model: SteeredModel,
    head_set: HeadSet,
    method: Method,
    examples: Sequence[ConflictExample],
    protect: Sequence[Protected],
    progress: Progress,
) -> tuple[Gate | None, dict[str, tuple[float, float]]]:
    """Return the gate of a method's betas on examples that the model knows, and their side effects.

    These are, by kind of prompt that steering should leave alone, the shares of right answers
    without and with steering, without a gate. The gate is None where none is good enough.
    """
    target = head_set.target
    some = Random(0).sample(examples, min(N_MEASURED, len(examples)))
    conflicts = [
        Case(e.prompts[t], e, target, prompt_alone(e, t))
        for t in judged_types(target, some)
        if t != "clean"
        for e in some
    ]
    groups = {"conflicts": conflicts, **endangered_prompts(target, some)}
    steer = Steer(target=target, head_set=head_set, method=method)
    seen = _seen(model, groups, steer, f"measuring the gate of {head_set.name}", progress)
    rules = [_rule(signal, seen) for signal in SIGNALS[target]]
    good = tuple(
        rule for rule in rules if rule and rule.kept >= LEAST_KEPT and _lost(rule) <= MOST_LOST
    )
    gate = Gate(chat_template_sha256=model.prompts.sha256, rules=good) if good else None
    protected = {kind: group for kind, group in seen.items() if kind in protect}
    return gate, {kind: _right(group, [True] * len(group)) for kind, group in protected.items()}


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """The answers to a case: steered, unsteered, and without its context."""

    case: Case
    prompt_ids: tuple[int, ...]
    steered: Completion
    unsteered: Completion | None = None
    alone: Completion | None = None

    def value(self, signal: Signal) -> float | None:
        """Return a signal's value; None where its run is missing."""
        run = self.alone if signal == "memory" else self.steered
        return None if run is None else value_of(signal, self.prompt_ids, run.tokens[0])

    def is_right(self, *, steers: bool) -> bool:
        run = self.steered if steers else self.unsteered
        return run is not None and self.case.example.is_right(run.text, self.case.answer)


def _seen(
    model: SteeredModel,
    groups: dict[str, list[Case]],
    steer: Steer,
    description: str,
    progress: Progress,
) -> dict[str, list[_Seen]]:
    """Run all prompts that fit: steered, and as the signals and what they are to save need it."""

    def ask(ids: tuple[int, ...], steer: Steer, max_tokens: int) -> Request:
        return model.request(ids, steer=steer, max_tokens=max_tokens, top_logprobs=1)

    none, wanted = Steer(target="none"), []
    for kind, cases in groups.items():
        for case in cases:
            n, opening = case.example.max_tokens, case.example.opening
            ids = model.tokenize(case.prompt, opening=opening)
            if not model.fits(ids, max_tokens=n):
                continue
            runs = {"steered": ask(ids, steer, 1 if kind == "conflicts" else n)}
            if kind != "conflicts":
                runs["unsteered"] = ask(ids, none, n)
            if steer.target == "parametric" and case.alone is not None:
                runs["alone"] = ask(model.tokenize(case.alone, opening=opening), none, 1)
            wanted.append((kind, case, runs))
    requests = [request for _, _, runs in wanted for request in runs.values()]
    done = iter(model.engine.generate(requests, progress=progress, description=description))
    seen: dict[str, list[_Seen]] = {kind: [] for kind, _, _ in wanted}
    for kind, case, runs in wanted:
        ids, answers = runs["steered"].prompt_ids, {name: next(done) for name in runs}
        seen[kind].append(_Seen(case=case, prompt_ids=ids, **answers))
    return seen


def _right(group: Sequence[_Seen], steered: Sequence[bool]) -> tuple[float, float]:
    """Return the shares of right answers: unsteered, and each steered or not as `steered` says."""
    return (
        fmean(one.is_right(steers=False) for one in group),
        fmean(one.is_right(steers=steers) for one, steers in zip(group, steered, strict=True)),
    )


def _rule(signal: Signal, seen: dict[str, list[_Seen]]) -> GateRule | None:
    """Return the rule of a signal; None where a prompt lacks it, or it cannot tell anything."""
    values = {kind: [one.value(signal) for one in group] for kind, group in seen.items()}
    known = {kind: [v for v in found if v is not None] for kind, found in values.items()}
    endangered = [kind for kind in seen if kind != "conflicts"]
    if not endangered or "conflicts" not in seen or known != values:
        return None

    def at(threshold: float) -> GateRule:
        return GateRule(
            signal=signal,
            threshold=threshold,
            n_prompts=len(known["conflicts"]),
            kept=fmean(value >= threshold for value in known["conflicts"]),
            side_effects={
                kind: _right(seen[kind], [value >= threshold for value in known[kind]])
                for kind in endangered
            },
        )

    # A token that is not copied, value 0, is no reason to steer, however often that is the case.
    low = [value for q in QUANTILES if (value := quantile(known["conflicts"], q))]
    high = quantile(known[endangered[0]], 1 - TAIL)
    if not low:
        return None
    middle = quantile(known["conflicts"], TAIL) or low[0]
    if high < middle:
        return at((high + middle) / 2)
    return min(map(at, low), key=lambda rule: max(_lost(rule), NEGLIGIBLE))


def _lost(rule: GateRule) -> float:
    """Return the largest share of right answers that prompts lose which a gate can save."""
    kinds = rule.side_effects.items()
    return max((before - after for k, (before, after) in kinds if k != "irrelevant"), default=0.0)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies, one of them."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
