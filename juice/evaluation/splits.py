"""The splits: examples that find the heads, that tune, and that test; disjoint and seeded.

    identification   the few on which JuICE, JuNe and `ph3_small` find their heads; each target has
                     its own where head sets differ
    large            those on which `ph3_large` finds its heads: up to 200, at most two fifths of
                     what is left
    validation       the given file, else 15 % of what was not drawn and what served head sets were
                     tuned on, filtered to what the model answers right on the clean prompt
    test             the rest, unfiltered, `limit` of them spread over the domains; not what served
                     head sets were found on, in whatever file that was

A domain is a relation. What is left out is counted by reason: a prompt too long for the model, or
two answers that begin with the same token, for example.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, NamedTuple

from juice.data.example import ConflictExample, examples_sha256
from juice.data.judging import normalise
from juice.errors import ExampleError
from juice.evaluation.methods import instructed
from juice.formula import TARGETS, ConflictType, Target
from juice.head_set.head_set import HeadSet
from juice.head_set.scores import ScoreKind
from juice.identification.examples import (
    N_TUNED_ON,
    known_examples,
    known_share,
    scored_prompt,
    unseen,
    usable_examples,
    validation_share,
)
from juice.identification.options import IdentificationOptions
from juice.identification.outcomes import answer_tokens
from juice.steered_model import SteeredModel

LARGE_SHARE = 0.4


@dataclass(frozen=True)
class Data:
    """The given data: examples to test on, others to tune and to find heads on, and texts.

    `texts` are plain texts for perplexity, `templates` those of paraphrased prompts by relation.
    """

    test: Sequence[ConflictExample]
    validation: Sequence[ConflictExample] | None = None
    identification: Sequence[ConflictExample] | None = None
    texts: Sequence[str] = ()
    templates: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Splits:
    """The examples of one evaluation; `left_out` counts, by reason, what was not used."""

    identification: dict[Target, list[ConflictExample]]
    large: list[ConflictExample]
    validation: list[ConflictExample]
    test: list[ConflictExample]
    left_out: dict[str, int] = field(default_factory=dict)

    def holds_finders_of(self, head_set: HeadSet) -> bool:
        """Return True where the examples a head set was found on are here, so not tested on."""
        found, here = head_set.identification, self.identification[head_set.target]
        return found is not None and examples_sha256(here) == found.examples_sha256

    def finders_of(self, target: Target) -> list[ConflictExample]:
        """Return the examples that find heads. Raises ExampleError where there are none."""
        if not self.identification[target]:
            raise ExampleError(
                "these examples do not tell what the model remembers, so heads cannot be found on "
                "them; give others with --examples"
            )
        return self.identification[target]

    @property
    def sha256(self) -> str:
        """The hash of the examples that find heads, tune and test."""
        groups = (*self.identification.values(), self.large, self.validation, self.test)
        return examples_sha256([example for group in groups for example in group])

    @property
    def domains(self) -> list[str]:
        """The domains of the test examples, sorted."""
        return sorted({domain_of(e) for e in self.test})


def domain_of(example: ConflictExample) -> str:
    """Return an example's domain: its relation, or `all` where it has none."""
    return example.relation or "all"


def split(
    model: SteeredModel,
    data: Data,
    head_sets: Mapping[Target, HeadSet],
    options: IdentificationOptions,
    *,
    n_large: int,
    limit: int | None,
) -> Splits:
    """Split the data for both targets, whichever is evaluated.

    The model decides what fits, what can be scored and what it knows. The examples that a head set
    in use was found on are recognised by their hash; where they are not in the data, others are set
    aside in their place. Facts that a set lists are not tested on. `n_large` and `limit` are the
    most for `ph3_large`, and to test on.

    Raises ExampleError where nothing is left to test on, or no example has the options' relation.
    """
    left_out: Counter[str] = Counter()
    pool = _usable(model, data.test, left_out)
    finders = pool if data.identification is None else _usable(model, data.identification, left_out)
    drawn, tuned_on = _finders_of(model, data, finders, head_sets, options)
    every_drawn = [e for examples in drawn.values() for e in examples]
    tuned = set(map(_key, tuned_on))
    tuned_on = [e for e in _without(finders, every_drawn) if _key(e) in tuned]
    rest = _without(pool, [*every_drawn, *tuned_on])
    given = (
        [*tuned_on, *validation_share(rest, options.seed)]
        if data.validation is None
        else _without(_usable(model, data.validation, left_out), every_drawn)
    )
    rest = _without(rest, given)
    validation = _complete(known_examples(model, given))
    unknown = "validation examples that the model does not know, or that lack a prompt"
    left_out[unknown] += len(given) - len(validation)
    unused = [] if data.identification is None else _without(finders, [*every_drawn, *given, *rest])
    large = _large(unused, rest, n_large, options.seed)
    rest = _without(rest, large)
    left = unseen(rest, head_sets.values())
    left_out["facts that a head set was found on"] += len(rest) - len(left)
    test = limited(left, limit, options.seed)
    counted = dict(+left_out)
    if not test:
        reasons = ", ".join(f"{n} {reason}" for reason, n in counted.items())
        raise ExampleError(
            f"none of {len(data.test)} examples is left to test on: "
            f"{reasons or 'all of them find heads or tune'}; "
            f"give others, at least {4 * options.n_wanted(len(pool))}"
        )
    return Splits(drawn, large, validation, test, counted)


def _finders_of(
    model: SteeredModel,
    data: Data,
    finders: list[ConflictExample],
    head_sets: Mapping[Target, HeadSet],
    options: IdentificationOptions,
) -> tuple[dict[Target, list[ConflictExample]], list[ConflictExample]]:
    """Return each target's examples that find heads, and those that head sets were tuned on."""
    given = data.test if data.identification is None else data.identification
    relations = {e.relation for e in (*data.test, *(data.identification or ())) if e.relation}
    if options.relation is not None and options.relation not in relations:
        raise ExampleError(
            f"no example has the relation {options.relation!r}; "
            f"the data has {', '.join(sorted(relations)) or 'none'}"
        )
    drawn, tuned_on = dict[Target, list[ConflictExample]](), list[ConflictExample]()

    @cache  # the heads of both targets are mostly found on the same examples
    def drawn_for(origin: Origin | None) -> Drawn:
        again = origin and _drawn_again(model, given, origin, options)
        return again or (_drawn(model, finders, options), [])

    for target in TARGETS:
        drawn[target], tuned = drawn_for(_origin_of(head_sets.get(target)))
        tuned_on += _without(tuned, tuned_on)
    return drawn, tuned_on


def _usable(
    model: SteeredModel, examples: Sequence[ConflictExample], left_out: Counter[str]
) -> list[ConflictExample]:
    """Return the examples that can be asked and scored; count the others by reason."""
    kept = []
    for example in examples:
        texts = {
            instructed(prompt, t, target)
            for t, prompt in example.prompts.items()
            for target in TARGETS
        }
        asked = (model.tokenize(text, opening=example.opening) for text in texts)
        right, is_open = (
            set(map(normalise, example.parametric_answer)),
            not example.parametric_answer,
        )
        n_tokens = answer_tokens(model, example)
        if not all(model.fits(ids, max_tokens=n_tokens) for ids in asked):
            left_out["prompts that are too long for the model"] += 1
        elif not right.isdisjoint(map(normalise, example.context_answer)):
            left_out["context answers that are a right answer"] += 1
        else:
            try:
                scored = [scored_prompt(model, example, t) for t in example.prompts]
            except ExampleError:
                scored = []
            # Where memory's answer is not known there is no p_y; answers are judged all the same.
            if is_open or (scored and not any(prompt.n_shared for prompt in scored)):
                kept.append(example)
            else:
                left_out["answers that begin with the same token, or with none"] += 1
    return kept


def _complete(examples: list[ConflictExample]) -> list[ConflictExample]:
    """Keep the examples that have every prompt that others of their domain have.

    Choices are made on the conflict types that all examples have.
    """
    wanted: dict[str, set[ConflictType]] = {}
    for example in examples:
        wanted.setdefault(domain_of(example), set()).update(example.prompts)
    return [e for e in examples if wanted[domain_of(e)] <= e.prompts.keys()]


# The examples that a head set was found on, and those that it was tuned on.
Drawn = tuple[list[ConflictExample], list[ConflictExample]]


class Origin(NamedTuple):
    """What tells which examples a head set was found on."""

    method: ScoreKind
    n_examples: int
    seed: int
    examples_sha256: str


def _origin_of(head_set: HeadSet | None) -> Origin | None:
    found = head_set.identification if head_set else None
    if found is None:
        return None
    return Origin(found.method, found.n_examples, found.seed, found.examples_sha256)


def _drawn_again(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    found: Origin,
    options: IdentificationOptions,
) -> Drawn | None:
    """Return the examples that a head set was found on, and those that it was tuned on.

    They are what `juice identify` draws from these examples; None where that gives another hash. It
    may have tuned on other examples, which are known where the set lists its facts.
    """
    relations = sorted({e.relation for e in examples if e.relation})
    for relation in dict.fromkeys((options.relation, None, *relations)):
        if sum(relation in (None, e.relation) for e in examples) < found.n_examples:
            continue
        again = IdentificationOptions(
            method=found.method, n_examples=found.n_examples, seed=found.seed, relation=relation
        )
        try:
            with warnings.catch_warnings(action="ignore"):
                drawn, rest = usable_examples(model, examples, again)
        except ExampleError:  # too few of them have the prompts that others have
            continue
        if examples_sha256(drawn) == found.examples_sha256:
            tuned_on = validation_share(rest, found.seed, n=N_TUNED_ON)
            if found.method != "probe":  # older versions tuned these sets on the others, too
                tuned_on += known_share(model, rest, found.seed)
            return drawn, tuned_on
    return None


def _drawn(
    model: SteeredModel, pool: list[ConflictExample], options: IdentificationOptions
) -> list[ConflictExample]:
    related = [e for e in pool if options.relation in (None, e.relation) and e.parametric_answer]
    types = Counter(frozenset(e.prompts) for e in related)
    if pool and not related:
        return []  # memory's answers are not known: heads cannot be found here
    if related:
        # Heads are found on examples with the same conflict types: the most common combination.
        commonest = max(types, key=lambda names: (types[names], len(names), sorted(names)))
        related = [e for e in related if e.prompts.keys() == commonest]
    n_examples = max(1, min(options.n_wanted(len(related)), len(related)))
    return usable_examples(model, related, options.but(n_examples=n_examples))[0]


def _large(
    unused: list[ConflictExample], rest: list[ConflictExample], n_large: int, seed: int
) -> list[ConflictExample]:
    """Draw the large identification set, from every domain.

    Unused examples come first, then at most two fifths of the rest.
    """
    drawn = Random(seed).sample(unused, min(n_large, len(unused)))
    n_more = min(n_large - len(drawn), int(LARGE_SHARE * len(rest)))
    chosen = set(Random(seed).sample(range(len(rest)), n_more))
    return [*drawn, *(e for i, e in enumerate(rest) if i in chosen)]


def limited(
    examples: Sequence[ConflictExample], limit: int | None, seed: int
) -> list[ConflictExample]:
    """Keep `limit` examples, spread evenly over the domains, in file order."""
    if limit is None or limit >= len(examples):
        return list(examples)
    rng, by_domain = Random(seed), dict[str, list[int]]()
    for i, example in enumerate(examples):
        by_domain.setdefault(domain_of(example), []).append(i)
    for places in by_domain.values():
        rng.shuffle(places)
    # Take one of each domain in turn, so that small domains run out first.
    order = sorted(
        (turn, domain, i) for domain, places in by_domain.items() for turn, i in enumerate(places)
    )
    kept = {i for _, _, i in order[:limit]}
    return [e for i, e in enumerate(examples) if i in kept]


def _key(example: ConflictExample) -> tuple[str, str]:
    """Return the key by which a fact in two files is one fact."""
    return domain_of(example), example.subject


def _without(
    examples: Sequence[ConflictExample], taken: Sequence[ConflictExample]
) -> list[ConflictExample]:
    keys = set(map(_key, taken))
    return [e for e in examples if _key(e) not in keys]
