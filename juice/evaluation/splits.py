"""Which examples find the heads, which tune, which test: disjoint, seeded, and what was left out said with its reason.

    identification   the few that JuICE, JuNe and `ph3_small` find their heads on; of each target its own where head sets differ
    large            those that `ph3_large` finds its heads on: up to 200, at most two fifths of what is left
    validation       the given file, else 15 % of what was not drawn; filtered by what the model answers right on the clean prompt
    test             the rest, unfiltered, `limit` of them spread over the domains

A domain is a relation. A prompt too long for the model is left out and counted, and so is an example whose two answers begin
with the same token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from juice.errors import ExampleError
from juice.evaluation.instructions import instructed
from juice.examples import ConflictExample, Target, examples_sha256
from juice.head_set import HeadSet
from juice.identification.run import Settings, usable_examples, validation_share
from juice.identification.scores import scored_prompt
from juice.identification.tuning import known_examples
from juice.scoring import MAX_TOKENS, normalise
from juice.steered_model import SteeredModel

LARGE_SHARE = 0.4


@dataclass(frozen=True)
class Data:
    """What is given: the examples to test on and, optionally, files of their own to tune on and to find heads on."""

    test: Sequence[ConflictExample]
    validation: Sequence[ConflictExample] | None = None
    identification: Sequence[ConflictExample] | None = None


@dataclass(frozen=True)
class Splits:
    """The examples of one evaluation; `left_out` counts, by reason, what was not used."""

    identification: dict[Target, list[ConflictExample]]
    large: list[ConflictExample]
    validation: list[ConflictExample]
    test: list[ConflictExample]
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def domains(self) -> list[str]:
        """The domains of the test examples, sorted."""
        return sorted({domain_of(e) for e in self.test})


def domain_of(example: ConflictExample) -> str:
    """Return an example's domain: its relation, or `all` where it has none."""
    return example.relation or "all"


def split(
    model: SteeredModel, data: Data, targets: Sequence[Target], head_sets: dict[Target, HeadSet], settings: Settings, *,
    n_large: int, limit: int | None,
) -> Splits:  # fmt: skip
    """Split the data; raises ExampleError when nothing is left to find heads on, or to test.

    For a head set that was found on examples of this data, those are found again by their hash.
    """
    left_out: Counter[str] = Counter()
    pool = _usable(model, data.test, left_out)
    finders = pool if data.identification is None else _usable(model, data.identification, left_out)
    drawn = {target: _drawn(model, finders, head_sets.get(target), settings) for target in targets}
    taken = _keys(e for own in drawn.values() for e in own)
    rest = [e for e in pool if _key(e) not in taken]
    if data.validation is None:
        candidates = validation_share(rest, settings.seed)
        rest = _without(rest, candidates)
    else:
        candidates = _usable(model, data.validation, left_out)
        rest = _without(rest, candidates)
    validation = known_examples(model, candidates)
    left_out["validation examples that the model does not know"] += len(candidates) - len(validation)
    others = _without(finders, candidates) if data.identification is not None else rest
    large = _large(others, n_large, settings.seed)
    test = limited(_without(rest, large), limit, settings.seed)
    if not test:
        raise ExampleError(f"nothing is left to test on: {_said(left_out) or 'the data is too small'}; give more examples")
    return Splits(drawn, large, validation, test, {reason: n for reason, n in left_out.items() if n})


def with_likeliest_answer(model: SteeredModel, examples: Sequence[ConflictExample]) -> list[ConflictExample]:
    """Put first, for p_y, the accepted answer whose first token the model finds most probable on the clean prompt.

    For data whose accepted answers come in no order (ParaConflict from the hub).
    """
    asked = [e for e in examples if len(e.parametric_answer) > 1 and "clean" in e.prompts]
    requests, choices = [], []
    for example in asked:
        prompt = example.prompts["clean"]
        tokens = {a: t for a in example.parametric_answer if (t := model.loaded.first_token(prompt, a)) is not None}
        choices.append(tokens)
        requests.append(model.request(prompt, max_tokens=1, watch=tuple(tokens.values())))
    best = {}
    for example, tokens, completion in zip(asked, choices, model.engine.generate(requests) if requests else [], strict=True):
        if tokens:
            first = max(zip(completion.watched, tokens, strict=True), key=lambda pair: pair[0])[1]
            answers = (first, *(a for a in example.parametric_answer if a != first))
            best[id(example)] = example.model_copy(update={"parametric_answer": answers})
    return [best.get(id(e), e) for e in examples]


def _usable(model: SteeredModel, examples: Sequence[ConflictExample], left_out: Counter[str]) -> list[ConflictExample]:
    limit, kept = model.loaded.max_positions or math.inf, []
    for example in examples:
        longest = [instructed(prompt, t, target) for t, prompt in example.prompts.items() for target in ("parametric", "context")]
        if any(len(model.tokenize(prompt)) + MAX_TOKENS > limit for prompt in longest):
            left_out["prompts that are too long for the model"] += 1
        elif set(map(normalise, example.parametric_answer)) & set(map(normalise, example.context_answer)):
            left_out["context answers that are a right answer"] += 1
        else:
            try:
                for conflict_type in example.prompts:
                    scored_prompt(model.loaded, example, conflict_type)
            except ExampleError:
                left_out["answers that begin with the same token, or with none"] += 1
            else:
                kept.append(example)
    return kept


def _drawn(model: SteeredModel, pool: list[ConflictExample], head_set: HeadSet | None, settings: Settings) -> list[ConflictExample]:
    """Return the examples that a head set was found on, where they are here; else draw."""
    found = head_set.identification if head_set else None
    if found is not None:
        for relation in (settings.relation, None, *sorted({e.relation for e in pool if e.relation})):
            if sum(relation in (None, e.relation) for e in pool) >= found.n_examples:
                again = replace(settings, n_examples=found.n_examples, seed=found.seed, relation=relation)
                drawn, _ = usable_examples(model, pool, again)
                if examples_sha256(drawn) == found.examples_sha256:
                    return drawn
    n = min(settings.n_examples, len([e for e in pool if settings.relation in (None, e.relation)]))
    return usable_examples(model, pool, replace(settings, n_examples=max(n, 1)))[0]


def _large(rest: list[ConflictExample], n_large: int, seed: int) -> list[ConflictExample]:
    """Draw the large identification set, of every domain, so that enough of each is left to test on."""
    chosen = set(Random(seed).sample(range(len(rest)), min(n_large, int(LARGE_SHARE * len(rest)))))
    return [e for i, e in enumerate(rest) if i in chosen]


def limited(examples: list[ConflictExample], limit: int | None, seed: int) -> list[ConflictExample]:
    """Keep `limit` examples, as many of every domain as can be, in file order."""
    if limit is None or limit >= len(examples):
        return examples
    rng, by_domain = Random(seed), dict[str, list[int]]()
    for i, example in enumerate(examples):
        by_domain.setdefault(domain_of(example), []).append(i)
    for own in by_domain.values():
        rng.shuffle(own)
    # One of each domain after the other, so that the smallest are used up first.
    order = sorted((turn, domain, i) for domain, own in by_domain.items() for turn, i in enumerate(own))
    kept = {i for _, _, i in order[:limit]}
    return [e for i, e in enumerate(examples) if i in kept]


def _key(example: ConflictExample) -> tuple[str, str]:
    return domain_of(example), example.subject


def _keys(examples: object) -> set[tuple[str, str]]:
    return {_key(e) for e in examples}  # type: ignore[attr-defined]


def _without(examples: Sequence[ConflictExample], taken: Sequence[ConflictExample]) -> list[ConflictExample]:
    """Leave out what is taken, by domain and subject: the same fact in two files is one fact."""
    keys = {_key(e) for e in taken}
    return [e for e in examples if _key(e) not in keys]


def _said(left_out: Counter[str]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in left_out.items() if n)
