"""The examples that heads are found on: drawn, with a seed, from those that can be scored.

The paper's probes take any; the other methods take those that the model knows, spread over the
relations.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from random import Random

from juice.data.example import ConflictExample, draw, judged_types
from juice.errors import ExampleError
from juice.identification.options import IdentificationOptions
from juice.identification.scored_prompt import scored_prompt
from juice.identification.validation import known_examples
from juice.methods import ConflictType, Target
from juice.steered_model import SteeredModel

N_LEAST = 4


def usable_examples(
    model: SteeredModel, examples: Sequence[ConflictExample], options: IdentificationOptions
) -> tuple[list[ConflictExample], list[ConflictExample]]:
    """Draw the examples to identify on from those that can be scored.

    Returns them and all that were not drawn. With a `relation`, only its examples are drawn. Warns
    of examples that cannot be scored, with the first reason, and of few. Raises ExampleError when
    too few are left.
    """
    candidates, reasons = [], []
    wanted = {t for e in examples if options.relation in (None, e.relation) for t in e.prompts}
    for example in examples:
        if options.relation is not None and example.relation != options.relation:
            continue
        try:
            if lacking := wanted - example.prompts.keys():
                raise ExampleError(
                    f"example {example.subject!r} has no {' and no '.join(sorted(lacking))} "
                    "prompt, but others have"
                )
            for conflict_type in example.prompts:
                scored_prompt(model, example, conflict_type)
            candidates.append(example)
        except ExampleError as error:
            reasons.append(str(error))
    if reasons:
        warnings.warn(
            f"{len(reasons)} examples cannot be scored and are not drawn; first: {reasons[0]}",
            stacklevel=2,
        )
    if options.relation is not None and not candidates and not reasons:
        known = sorted({e.relation for e in examples if e.relation})
        raise ExampleError(
            f"no example has the relation {options.relation!r}; "
            f"the file has {', '.join(known) or 'none'}"
        )
    if options.method == "probe":
        drawn, _ = draw(candidates, options.n_wanted(len(candidates)), options.seed)
    else:
        drawn = _draw_known(model, candidates, options)
    chosen = set(map(id, drawn))
    return drawn, [e for e in examples if id(e) not in chosen]


def _draw_known(
    model: SteeredModel, candidates: Sequence[ConflictExample], options: IdentificationOptions
) -> list[ConflictExample]:
    """Draw examples that the model answers right without a context, in file order."""
    n = options.n_wanted(len(candidates))
    draw(candidates, n, options.seed)  # complains of too few
    order, known = list(_spread(candidates, options.seed)), list[ConflictExample]()
    while order and len(known) < n:
        asked, order = order[: 2 * n], order[2 * n :]
        known += known_examples(model, [e for e in asked if _fits(model, e)])
    if not known:
        raise ExampleError(
            f"the model answers none of {len(candidates)} clean prompts right; "
            "give examples of facts that it knows"
        )
    if len(known) < min(n, N_LEAST):
        warnings.warn(
            f"the model knows only {len(known)} of {len(candidates)} examples: heads found on so "
            "few may be weak",
            stacklevel=3,
        )
    chosen = set(map(id, known[:n]))
    return [e for e in candidates if id(e) in chosen]


def _fits(model: SteeredModel, example: ConflictExample) -> bool:
    """Return whether there is room for an answer to the clean prompt."""
    prompt = example.prompts.get("clean")
    return prompt is None or model.fits(
        model.tokenize(prompt, opening=example.opening), max_tokens=example.max_tokens
    )


def _spread(candidates: Sequence[ConflictExample], seed: int) -> Iterator[ConflictExample]:
    """Yield the examples in a seeded order that takes the relations in turn."""
    rng, by_relation = Random(seed), dict[str | None, list[ConflictExample]]()
    for example in rng.sample(candidates, len(candidates)):
        by_relation.setdefault(example.relation, []).append(example)
    for example in chain.from_iterable(zip_longest(*by_relation.values())):
        if example is not None:
            yield example


def check_conflicts(drawn: Sequence[ConflictExample], target: Target) -> tuple[ConflictType, ...]:
    """Return the conflict types of a target; raises ExampleError where there is no conflict."""
    types = judged_types(target, drawn)
    if not set(types) - {"clean"}:
        raise ExampleError(
            f"the examples hold no conflict for the {target} target; give each a substitution or a "
            "coherent prompt in addition to the clean one"
        )
    return types
