"""Three answers side by side in a terminal, each token coloured by where it comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from juice.engine import Completion
    from juice.steered_model import Origin, SteeredModel

TITLES = {"parametric": "Memory", "none": "Unsteered", "context": "Context"}
COLOURS = {"parametric": "yellow", "none": "default", "context": "cyan"}
FROM_CONTEXT, FROM_MEMORY = "black on bright_cyan", "black on bright_yellow"
# By how many nats the context must make a token likelier, or less likely, to colour it.
THRESHOLD = 1.0
N_CANDIDATES, BAR = 3, 10


def show(
    model: SteeredModel, completions: Sequence[Completion], prompt: str, context: str | None
) -> None:
    """Print answers to one prompt, that toward memory first.

    Args:
        model: The model.
        completions: The answers, with the candidates for their first tokens.
        prompt: The prompt.
        context: What was put before it; None: tokens have no colour.
    """
    origins = _origins(model, completions, prompt, context)
    by_target = {own.steering.target: i for i, own in enumerate(completions)}
    table = Table(expand=True)
    cells = []
    for target in TITLES:
        if target in by_target:
            table.add_column(TITLES[target], header_style=f"bold {COLOURS[target]}", ratio=1)
            i = by_target[target]
            cells.append(_answer(model, completions[i], None if origins is None else origins[i]))
    table.add_row(*cells)
    Console(highlight=False).print(table)
    if origins is not None:
        legend = Text("likelier with the context", FROM_CONTEXT)
        legend.append("  ", "default").append("likelier without it", FROM_MEMORY)
        Console(highlight=False).print(legend)


def _origins(
    model: SteeredModel, completions: Sequence[Completion], prompt: str, context: str | None
) -> list[list[Origin]] | None:
    from juice.steered_model import join_context, origin_requests, origins_of

    if context is None:
        return None
    answers = [own.token_ids for own in completions]
    whole, alone = model.tokenize(join_context(context, prompt)), model.tokenize(prompt)
    requests = origin_requests(model, whole, alone, answers)
    return origins_of(model.engine.generate(requests), answers)


def _answer(model: SteeredModel, completion: Completion, origins: Sequence[Origin] | None) -> Text:
    tokenizer: Any = model.description.tokenizer
    text = Text()
    for i, token in enumerate(completion.tokens):
        if token.id in tokenizer.all_special_ids:
            continue
        gain = 0.0 if origins is None else origins[i].gain
        style = FROM_CONTEXT if gain > THRESHOLD else FROM_MEMORY if gain < -THRESHOLD else ""
        text.append(tokenizer.decode([token.id]), style)
    text.append("\n\nfirst token\n", "dim")
    for other, logprob in completion.tokens[0].top[:N_CANDIDATES]:
        share = math.exp(logprob)
        name = tokenizer.decode([other]).strip() or "␣"
        text.append(
            f"{'█' * max(1, round(share * BAR)):{BAR}} ", COLOURS[completion.steering.target]
        )
        text.append(f"{share:4.0%} {name}\n")
    return text
