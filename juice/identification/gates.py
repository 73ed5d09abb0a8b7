"""The gate of a tuned head set, measured on validation examples (docs/method.md, "Gates").

Where the signals of prompts with a conflict lie above those of the prompts that steering endangers
most, the threshold is half way between them. Elsewhere it is the lowest of some low quantiles over
the conflicts, which should stay steered, that does little harm. A rule that shuts out too many of
them, or does harm all the same, is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from juice.data.contexts import prompt_alone
from juice.data.example import ConflictExample, judged_types
from juice.engine import Completion, GenerationRequest, Steer
from juice.engine.gate import value_of
from juice.head_set import Gate, GateRule, HeadSet
from juice.head_set.gates import Signal
from juice.identification.protection import Endangered, Protection, endangered_prompts
from juice.methods import Method, Target
from juice.progress import Progress
from juice.steered_model import SteeredModel

N_MEASURED = 40
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
    protection: Protection,
    progress: Progress,
) -> tuple[Gate | None, dict[str, tuple[float, float]]]:
    """Return the gate of a method's betas, and what these do without one.

    That is, by kind of prompt that steering should leave alone, the shares of right answers without
    and with steering. The gate is None where none is good enough.

    Args:
        model: The model, which takes prompts in the form of the set.
        head_set: The head set.
        method: Whose betas.
        examples: Examples that the model knows.
        protection: Which prompts steering should leave alone.
        progress: Reports how many prompts are read.
    """
    target = head_set.target
    some = Random(0).sample(examples, min(N_MEASURED, len(examples)))
    conflicts = [
        Endangered(e.prompts[t], prompt_alone(e, t), e, target)
        for t in judged_types(target, some)
        if t != "clean"
        for e in some
    ]
    groups = {"conflicts": conflicts, **endangered_prompts(target, some)}
    steer = Steer(target=target, head_set=head_set, method=method)
    seen = _seen(model, groups, steer, f"measuring the gate of {head_set.name}", progress)
    rules = [_rule(signal, seen) for signal in SIGNALS[target]]
    good = tuple(rule for rule in rules if rule is not None and _is_good(rule))
    gate = Gate(chat_template_sha256=model.prompts.sha256, rules=good) if good else None
    side_effects: dict[str, tuple[float, float]] = {
        kind: (
            fmean(one.is_right(steers=False) for one in own),
            fmean(one.is_right(steers=True) for one in own),
        )
        for kind, own in seen.items()
        if kind in protection.kinds
    }
    return gate, side_effects


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """The answers of a prompt's runs: steered, unsteered, and without its context."""

    prompt: Endangered
    prompt_ids: tuple[int, ...]
    steered: Completion
    unsteered: Completion | None = None
    alone: Completion | None = None

    def value(self, signal: Signal) -> float | None:
        """Return a signal's value; None where its run is missing."""
        run = self.alone if signal == "memory" else self.steered
        return None if run is None else value_of(signal, self.prompt_ids, run.tokens[0])

    def is_right(self, *, steers: bool) -> bool:
        """Return whether the answer is right, with steering or without."""
        run = self.steered if steers else self.unsteered
        return run is not None and self.prompt.example.is_right(run.text, self.prompt.answer)


def _seen(
    model: SteeredModel,
    groups: dict[str, list[Endangered]],
    steer: Steer,
    description: str,
    progress: Progress,
) -> dict[str, list[_Seen]]:
    """Run all prompts that fit: steered, and as the signals and what they are to save need it."""

    def ask(ids: tuple[int, ...], steer: Steer, max_tokens: int) -> GenerationRequest:
        return model.request(ids, steer=steer, max_tokens=max_tokens, top_logprobs=1)

    none, wanted = Steer(target="none"), []
    for kind, prompts in groups.items():
        for own in prompts:
            n, opening = own.example.max_tokens, own.example.opening
            ids = model.tokenize(own.prompt, opening=opening)
            if not model.fits(ids, max_tokens=n):
                continue
            runs = {"steered": ask(ids, steer, 1 if kind == "conflicts" else n)}
            if kind != "conflicts":
                runs["unsteered"] = ask(ids, none, n)
            if steer.target == "parametric" and own.alone is not None:
                runs["alone"] = ask(model.tokenize(own.alone, opening=opening), none, 1)
            wanted.append((kind, own, runs))
    requests = [request for _, _, runs in wanted for request in runs.values()]
    done = iter(model.engine.generate(requests, progress=progress, description=description))
    seen: dict[str, list[_Seen]] = {kind: [] for kind, _, _ in wanted}
    for kind, own, runs in wanted:
        ids = runs["steered"].prompt_ids
        seen[kind].append(_Seen(prompt=own, prompt_ids=ids, **{name: next(done) for name in runs}))
    return seen


def _rule(signal: Signal, seen: dict[str, list[_Seen]]) -> GateRule | None:
    """Return the rule of a signal; None where a prompt lacks it, or it cannot tell anything."""
    values = {kind: [one.value(signal) for one in own] for kind, own in seen.items()}
    known = {k: [v for v in own if v is not None] for k, own in values.items()}
    endangered = [kind for kind in seen if kind != "conflicts"]
    if (
        not endangered
        or "conflicts" not in seen
        or any(len(known[kind]) < len(values[kind]) for kind in seen)
    ):
        return None

    def at(threshold: float) -> GateRule:
        return GateRule(
            signal=signal,
            threshold=threshold,
            n_prompts=len(known["conflicts"]),
            kept=fmean(value >= threshold for value in known["conflicts"]),
            side_effects={
                kind: (
                    fmean(one.is_right(steers=False) for one in seen[kind]),
                    fmean(
                        one.is_right(steers=value >= threshold)
                        for one, value in zip(seen[kind], known[kind], strict=True)
                    ),
                )
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
    return min(map(at, low), key=lambda rule: max(rule.lost, NEGLIGIBLE))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies, one of them."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def _is_good(rule: GateRule) -> bool:
    return rule.kept >= LEAST_KEPT and rule.lost <= MOST_LOST
