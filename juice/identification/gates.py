"""The gate of a tuned head set, measured on validation examples (docs/method.md, "Gates").

Where the signals of prompts with a conflict lie above those of the prompts that steering endangers
most, the threshold is half way between them. Otherwise it is the lowest of four low quantiles of
the conflicts' signal that breaks at most 5 % of the other answers. A rule that shuts out too many
conflicts, or does harm all the same, is dropped. Irrelevant contexts do not count as harm here,
since no signal tells them from false ones; what becomes of them is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import NamedTuple

from juice.data.example import ConflictExample, judged_types, prompt_alone
from juice.engine.answer import Completion
from juice.engine.request import Request, value_of
from juice.engine.steer import Steer
from juice.formula import Method, Target
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Gate, GateRule, Signal
from juice.identification.first_tokens import Case, endangered_prompts
from juice.identification.options import Protected
from juice.identification.outcomes import answer_tokens
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


# Gives an answer to an example's prompt, with the likeliest token beside each of its own.
Known = Callable[[ConflictExample, str, Method | None], Completion | None]


class Measured(NamedTuple):
    """The gate of a method's betas, and what they do without one.

    The gate is None where none is good enough. The side effects are, by kind of prompt that
    steering should leave alone, the shares of right answers without and with steering.
    """

    gate: Gate | None
    side_effects: dict[str, tuple[float, float]]


def measured_gates(
    model: SteeredModel,
    head_set: HeadSet,
    methods: Sequence[Method],
    examples: Sequence[ConflictExample],
    protect: Sequence[Protected],
    progress: Progress,
    known: Known = lambda *_: None,
) -> dict[Method, Measured]:
    """Return what is measured of each method on examples that the model knows.

    `known` gives the answer to an example's prompt by a method, or unsteered, where there is one;
    else the model is asked.
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
    seen = _seen(model, head_set, methods, groups, progress, known)
    found: dict[Method, Measured] = {}
    for method, of_method in seen.items():
        rules = [_rule(signal, of_method) for signal in SIGNALS[target]]
        good = tuple(
            rule for rule in rules if rule and rule.kept >= LEAST_KEPT and _lost(rule) <= MOST_LOST
        )
        gate = Gate(chat_template_sha256=model.prompts.sha256, rules=good) if good else None
        protected = {kind: group for kind, group in of_method.items() if kind in protect}
        effects = {kind: _right(group, [True] * len(group)) for kind, group in protected.items()}
        found[method] = Measured(gate, effects)
    return found


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


class _Run(NamedTuple):
    """A run of a prompt's tokens by a method, or unsteered."""

    prompt_ids: tuple[int, ...]
    method: Method | None
    max_tokens: int


def _seen(
    model: SteeredModel,
    head_set: HeadSet,
    methods: Sequence[Method],
    groups: dict[str, list[Case]],
    progress: Progress,
    known: Known,
) -> dict[Method, dict[str, list[_Seen]]]:
    """Run all prompts that fit: steered, and as the signals and what they are to save need it.

    What is needed twice, such as the run without steering for several methods, is run once.
    """
    target, wanted = head_set.target, []
    asked, done = dict[_Run, Request](), dict[_Run, Completion]()

    def ask(case: Case, prompt: str, method: Method | None, max_tokens: int) -> _Run:
        ids = model.tokenize(prompt, opening=case.example.opening)
        run = _Run(ids, method, max_tokens)
        if (answer := known(case.example, prompt, method)) is not None:
            done[run] = answer
        elif run not in asked:
            steer = Steer(target="none")
            if method is not None:
                steer = Steer(target=target, head_set=head_set, method=method)
            asked[run] = model.request(ids, steer=steer, max_tokens=max_tokens, top_logprobs=1)
        return run

    for kind, cases in groups.items():
        for case in cases:
            n = answer_tokens(model, case.example)
            ids = model.tokenize(case.prompt, opening=case.example.opening)
            if not model.fits(ids, max_tokens=n):
                continue
            n_read = 1 if kind == "conflicts" else n
            runs = {method: ask(case, case.prompt, method, n_read) for method in methods}
            unsteered = alone = None
            if kind != "conflicts":
                unsteered = ask(case, case.prompt, None, n)
            if "memory" in SIGNALS[target] and case.alone is not None:
                alone = ask(case, case.alone, None, 1)
            wanted.append((kind, case, runs, unsteered, alone))
    description = f"measuring the gate of {head_set.name}"
    answers = model.engine.generate([*asked.values()], progress=progress, description=description)
    done.update(zip(asked, answers, strict=True))
    seen = {method: {kind: list[_Seen]() for kind, *_ in wanted} for method in methods}
    for kind, case, runs, unsteered, alone in wanted:
        for method, run in runs.items():
            one = _Seen(
                case=case,
                prompt_ids=run.prompt_ids,
                steered=done[run],
                unsteered=None if unsteered is None else done[unsteered],
                alone=None if alone is None else done[alone],
            )
            seen[method][kind].append(one)
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
