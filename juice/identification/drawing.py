"""The examples that heads are found on: drawn, with a seed, from those that can be scored."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from juice.data.example import ConflictExample, draw
from juice.errors import ExampleError
from juice.identification.options import IdentificationOptions
from juice.identification.scored_prompt import scored_prompt
from juice.steered_model import SteeredModel


def usable_examples(
    model: SteeredModel, examples: Sequence[ConflictExample], options: IdentificationOptions
) -> tuple[list[ConflictExample], list[ConflictExample]]:
    """Draw the examples to identify on from those that can be scored.

    Returns them and all that were not drawn. With a `relation`, only its examples are drawn. Warns
    of examples that cannot be scored, with the first reason. Raises ExampleError when too few are
    left.
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
    drawn, _ = draw(candidates, options.n_examples, options.seed)
    chosen = set(map(id, drawn))
    return drawn, [e for e in examples if id(e) not in chosen]
