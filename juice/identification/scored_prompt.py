"""What p_y looks at: a prompt's tokens and the first token of each answer.

docs/method.md defines p_y ("Notation"). ParaConflict's rows on the hub list all accepted answers in
no order: there the one whose first token the model finds most probable on the clean prompt is
scored ("Datasets and scoring").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from juice.data.example import ConflictExample
from juice.errors import ExampleError
from juice.methods import ConflictType, Target
from juice.steered_model import SteeredModel


@dataclass(frozen=True)
class ScoredPrompt:
    """One prompt of one conflict type and the first token of each target's answer."""

    ids: tuple[int, ...]
    answer_tokens: dict[Target, int]


def scored_prompt(
    model: SteeredModel, example: ConflictExample, conflict_type: ConflictType
) -> ScoredPrompt:
    """Tokenise one prompt. Raises ExampleError with the reason when it cannot be scored."""
    prompt = example.prompts[conflict_type]
    ids = model.prompts.tokens(prompt, example.opening)
    limit = model.description.max_positions
    where = f"example {example.subject!r} ({conflict_type})"
    if not ids:
        raise ExampleError(f"{where}: the prompt has no tokens")
    if limit is not None and len(ids) > limit:
        raise ExampleError(
            f"{where}: the prompt has {len(ids)} tokens, the model's context {limit}"
        )
    tokens: dict[Target, int] = {}
    for target in ("parametric", "context"):
        token = model.first_token(prompt, example.answer(target), opening=example.opening)
        if token is None:
            raise ExampleError(
                f"{where}: the {target} answer {example.answer(target)!r} has no tokens of its own"
            )
        tokens[target] = token
    if tokens["parametric"] == tokens["context"]:
        raise ExampleError(
            f"{where}: both answers begin with the same token; p_y cannot tell them apart"
        )
    return ScoredPrompt(ids, tokens)


def with_scored_answers(
    model: SteeredModel, examples: Sequence[ConflictExample]
) -> list[ConflictExample]:
    """Put the scored answer first in the examples that leave the choice to the model."""
    asked = [e for e in examples if e.scored == "likeliest" and "clean" in e.prompts]
    requests, choices = [], []
    for example in asked:
        prompt = example.prompts["clean"]
        tokens = {
            a: t
            for a in example.parametric_answer
            if (t := model.first_token(prompt, a, opening=example.opening)) is not None
        }
        choices.append(tokens)
        ids = model.tokenize(prompt, opening=example.opening)
        requests.append(model.request(ids, max_tokens=1, watch=tuple(tokens.values())))
    best = {}
    for example, tokens, completion in zip(
        asked, choices, model.engine.generate(requests), strict=True
    ):
        if tokens:
            first = max(zip(completion.watched, tokens, strict=True), key=lambda pair: pair[0])[1]
            answers = (first, *(a for a in example.parametric_answer if a != first))
            best[id(example)] = example.model_copy(
                update={"parametric_answer": answers, "scored": "first"}
            )
    return [best.get(id(e), e) for e in examples]
