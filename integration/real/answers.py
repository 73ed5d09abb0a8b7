"""The answers of a model to cases, with and without steering, each asked once, and shares of them.

A case is a prompt of an example and the target whose answer to it is right. Answers are greedy and
have 8 tokens, and each is judged by its example's own rule. A row of the results is a share of
prompts or facts with its 95 % interval:

    {"part", "measure", "way", "n", "share", "interval"}

Two prompts of one row may be about one fact; intervals take them as independent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from juice.engine.request import Request
from juice.engine.steer import Steer
from juice.errors import HeadSetError
from juice.head_set.head_set import HeadSet
from juice.identification.first_tokens import Case
from juice.identification.outcomes import difference_interval, share_interval
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

N_TOKENS = 8
N_KEPT_AT_ONCE = 64
Row = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A way to ask, and its name in the results: `unsteered`, `juice`, `june`, `juice, gate`."""

    name: str
    steer: Steer

    @property
    def gated(self) -> Way:
        """The same, which steers only where the head set's gate finds a reason to."""
        return Way(f"{self.name}, gate", Steer.of(self.steer, gate="auto"))


UNSTEERED = Way("unsteered", Steer(target="none"))


def ways_of(head_set: HeadSet) -> list[Way]:
    """Return the ways of a head set: its default method, then the others that have betas.

    Raises HeadSetError where no method has any.
    """
    methods = dict.fromkeys((head_set.method, *head_set.methods.given))
    ways = [
        Way(m, Steer(target=head_set.target, head_set=head_set, method=m))
        for m in methods
        if head_set.betas(m) is not None
    ]
    if not ways:
        raise HeadSetError(
            f"head set {head_set.name!r} has no betas for any method; tune it (`juice tune`)"
        )
    return ways


@dataclass(eq=False)
class Answers:
    """The answers of one model to the cases that it was asked about, by way and tokens.

    Args:
        model: The model, which takes prompts plainly or in a chat.
        progress: Reports how many prompts are answered.
        kept_in: A file that keeps the answers, for a later run that asks the same; None: memory.
    """

    model: SteeredModel
    progress: Progress = silent
    kept_in: Path | None = None
    _texts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kept_in is not None and self.kept_in.exists():
            lines = self.kept_in.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]  # the last may be cut off
            self.kept_in.write_text("".join(whole), encoding="utf-8")
            self._texts.update(json.loads(line) for line in whole)

    def texts(self, cases: Sequence[Case], way: Way) -> list[str]:
        """Return the answer to each case."""
        requests = [self._request(case, way) for case in cases]
        keys = self._keys(requests, way)
        new = {key: r for key, r in zip(keys, requests, strict=True) if key not in self._texts}
        keys_of_new, description = list(new), f"asking, {way.name}"
        size = len(new) if self.kept_in is None else N_KEPT_AT_ONCE
        for at in range(0, len(new), size or 1):
            some = keys_of_new[at : at + size]
            done = self.model.engine.generate(
                [new[key] for key in some], progress=self.progress, description=description
            )
            self._keep({key: one.text for key, one in zip(some, done, strict=True)})
        return [self._texts[key] for key in keys]

    def _keep(self, texts: dict[str, str]) -> None:
        self._texts.update(texts)
        if self.kept_in is not None:
            with self.kept_in.open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(pair)}\n" for pair in texts.items())

    def _keys(self, requests: Sequence[Request], way: Way) -> list[str]:
        """Return the hashes of all that each answer depends on."""
        description, head_set = self.model.description, way.steer.head_set
        seal = head_set.seal if isinstance(head_set, HeadSet) else None
        model = description.identity.fingerprint or description.identity.id, description.dtype
        asked = ((r.prompt_ids, r.options.without_context) for r in requests)
        return [
            sha256(json.dumps([model, seal, way.name, one]).encode()).hexdigest() for one in asked
        ]

    def right(self, cases: Sequence[Case], way: Way) -> list[bool]:
        """Return whether each case is answered right."""
        texts = self.texts(cases, way)
        return [c.example.is_right(t, c.answer) for c, t in zip(cases, texts, strict=True)]

    def fitting(self, cases: Sequence[Case]) -> list[Case]:
        """Return the cases whose prompts leave room for an answer."""
        return [case for case in cases if self.model.engine.fits(self._request(case, UNSTEERED))]

    def has_gate(self, way: Way, cases: Sequence[Case]) -> bool:
        """Return whether the head set of a way has a gate that can decide about all these cases."""
        head_set = way.steer.head_set
        assert isinstance(head_set, HeadSet), "ways_of gives each way its head set"
        gate = head_set.gate(way.steer.method_with(head_set))
        if gate is None or gate.chat_template_sha256 != self.model.chat_template_sha256:
            return False
        needs_alone = all(rule.signal == "memory" for rule in gate.rules)
        return not needs_alone or all(case.alone is not None for case in cases)

    def _request(self, case: Case, way: Way) -> Request:
        opening, alone = case.example.opening, None
        if way.steer.gate == "auto" and case.alone is not None:
            alone = self.model.tokenize(case.alone, opening=opening)
        ids = self.model.tokenize(case.prompt, opening=opening)
        return self.model.request(ids, steer=way.steer, without_context=alone, max_tokens=N_TOKENS)


def share_row(part: str, measure: str, way: str, hits: Sequence[bool] | None) -> Row:
    """Return the row of a share; without hits it has none."""
    values = [float(hit) for hit in hits or ()]
    return {
        "part": part,
        "measure": measure,
        "way": way,
        "n": len(values),
        "share": fmean(values) if values else None,
        "interval": share_interval(values),
    }


def difference_row(part: str, measure: str, way: str, gains: Sequence[float]) -> Row:
    """Return the row of a mean paired difference."""
    return {
        "part": part,
        "measure": measure,
        "way": way,
        "n": len(gains),
        "difference": fmean(gains) if gains else None,
        "interval": difference_interval(gains),
    }


def parts_of(cases: Sequence[Case], size: int) -> Iterator[Sequence[Case]]:
    """Yield the cases in parts of a size."""
    return (cases[at : at + size] for at in range(0, len(cases), size))
