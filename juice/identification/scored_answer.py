"""Which accepted answer p_y scores, where the data does not say (method.md, datasets).

ParaConflict's rows on the hub list all accepted answers in no order: the one whose first token the model finds most
probable on the clean prompt is scored.
"""

from __future__ import annotations

from collections.abc import Sequence

from juice.examples import ConflictExample
from juice.steered_model import SteeredModel


def with_scored_answers(model: SteeredModel, examples: Sequence[ConflictExample]) -> list[ConflictExample]:
    """Put the answer that is scored first, in the examples that leave it to the model."""
    asked = [e for e in examples if e.scored == "likeliest" and "clean" in e.prompts]
    requests, choices = [], []
    for example in asked:
        prompt = example.prompts["clean"]
        tokens = {a: t for a in example.parametric_answer if (t := model.loaded.prompts.first_token(prompt, a)) is not None}
        choices.append(tokens)
        requests.append(model.request(prompt, max_tokens=1, watch=tuple(tokens.values())))
    best = {}
    for example, tokens, completion in zip(asked, choices, model.engine.generate(requests) if requests else [], strict=True):
        if tokens:
            first = max(zip(completion.watched, tokens, strict=True), key=lambda pair: pair[0])[1]
            answers = (first, *(a for a in example.parametric_answer if a != first))
            best[id(example)] = example.model_copy(update={"parametric_answer": answers, "scored": "first"})
    return [best.get(id(e), e) for e in examples]
