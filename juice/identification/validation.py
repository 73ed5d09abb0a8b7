"""The examples that betas are tuned on: those the model knows and has room to answer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from juice.data.example import ConflictExample, draw, judged_types
from juice.errors import ExampleError
from juice.identification.trials import answer
from juice.methods import Target
from juice.steered_model import SteeredModel

N_FEW = 20
VALIDATION_SHARE = 0.15
N_TUNED_ON = 40


def validation_share(
    examples: Sequence[ConflictExample], seed: int, n: int | None = None
) -> list[ConflictExample]:
    """Return the examples, drawn with a seed, that tune betas without a validation file.

    Args:
        examples: Those that did not find heads.
        seed: Seed of the draw.
        n: How many, at most; None: 15 % of them.
    """
    n = max(1, round(VALIDATION_SHARE * len(examples))) if n is None else min(n, len(examples))
    return draw(examples, n, seed)[0] if examples else []


def known_examples(
    model: SteeredModel, examples: Sequence[ConflictExample]
) -> list[ConflictExample]:
    """Keep the examples whose clean prompt is answered right, unsteered, or that have none."""
    asked = [e for e in examples if "clean" in e.prompts]
    completions = answer(model, asked, ("clean",), "parametric")["clean"]
    wrong = {
        id(e)
        for e, c in zip(asked, completions, strict=True)
        if not e.is_right(c.text, "parametric")
    }
    return [e for e in examples if id(e) not in wrong]


def usable_validation(
    model: SteeredModel, validation: Sequence[ConflictExample], target: Target
) -> list[ConflictExample]:
    """Return the validation examples that can be used.

    Warns of what is left out and of too few. Raises ExampleError when none is left.
    """
    if not validation:
        raise ExampleError(
            "no examples are left to tune the betas on; "
            "give more examples, or a file with --validation"
        )
    wanted = {t for e in validation for t in e.prompts}
    complete = [e for e in validation if wanted <= e.prompts.keys()]
    if n_partial := len(validation) - len(complete):
        warnings.warn(
            f"{n_partial} validation examples lack a prompt that others have and are left out",
            stacklevel=3,
        )
    fitting = [
        e
        for e in complete
        if all(
            model.fits(model.tokenize(p, opening=e.opening), max_tokens=e.max_tokens)
            for p in e.prompts.values()
        )
    ]
    examples = known_examples(model, fitting)
    if not examples or not judged_types(target, examples):
        raise ExampleError(
            f"none of {len(validation)} validation examples can be used: "
            "the model answers none of their clean prompts, "
            f"or they share no conflict type for {target}; give others with --validation"
        )
    if len(examples) < N_FEW:
        warnings.warn(
            f"only {len(examples)} examples tune the betas, which may fit nothing else; "
            f"{N_FEW} or more are better",
            stacklevel=3,
        )
    return examples


def taking_turns(examples: Sequence[ConflictExample], target: Target) -> list[ConflictExample]:
    """Return the examples with one conflict prompt each, of the target's conflict types in turn.

    Two prompts about one fact say little more than one. Fewer than 20 examples are left as they
    are.
    """
    if len(examples) < N_FEW:
        return list(examples)
    types = [t for t in judged_types(target, examples) if t != "clean"]
    return [
        e.model_copy(update={"prompts": {t: e.prompts[t]}})
        for i, e in enumerate(examples)
        for t in types[i % max(1, len(types)) :][:1]
    ]
