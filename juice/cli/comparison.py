"""Three answers side by side in a terminal, each token coloured by where it comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from juice.engine import Completion, SteerTarget
    from juice.steered_model import Origin, SteeredModel

TITLES: dict[SteerTarget, str] = {
    "parametric": "Memory",
    "none": "Unsteered",
    "context": "Context",
}
COLOURS = {"parametric": "yellow", "none": "default", "context": "cyan"}
FROM_CONTEXT, FROM_MEMORY = "black on bright_cyan", "black on bright_yellow"
# By how many nats the context must make a token likelier, or less likely, to colour it.
THRESHOLD = 1.0
PARTS = "┃"  # before the token in which memory and context part
N_CANDIDATES, BAR = 3, 6


class Piece(NamedTuple):
    """Text that one token, or the tokens of one character, add: those from `first` to `last`."""

    text: str
    first: int
    last: int


def show(
    completions: Sequence[Completion],
    origins: Sequence[Sequence[Origin]] | None,
    tokenizer: Any,
) -> None:
    """Print answers to one prompt, that toward memory first, and what they show in a sentence.

    Args:
        completions: The answers, with the candidates for their first tokens.
        origins: Where their tokens come from; None, without a context: tokens have no colour.
        tokenizer: Spells the candidates.
    """
    found = {own.steering.target: own for own in completions}
    by_target = dict(zip(found, origins, strict=True)) if origins is not None else {}
    parting = _parting(found)
    table = Table(expand=True)
    cells = []
    for target, title in TITLES.items():
        if target in found:
            table.add_column(title, header_style=f"bold {COLOURS[target]}", ratio=1)
            marked = None if target == "none" else parting
            answer = _answer(found[target], by_target.get(target), marked)
            cells.append(Group(answer, "", _candidates(found[target], tokenizer)))
    table.add_row(*cells)
    console = Console(highlight=False)
    console.print(table)
    console.print(_verdict(found))
    console.print(_legend(has_origins=origins is not None, has_parting=parting is not None))


def origins_in(
    model: SteeredModel,
    completions: Sequence[Completion],
    whole: Sequence[int],
    alone: Sequence[int],
) -> list[list[Origin]]:
    """Read the answers once more, unsteered, after the tokens with the context and without it."""
    from juice.steered_model import origin_requests, origins_of

    answers = [own.token_ids for own in completions]
    requests = origin_requests(model, whole, alone, answers)
    return origins_of(model.engine.generate(requests), answers)


def pieces_of(completion: Completion) -> list[Piece]:
    """Return an answer's text in pieces of whole characters, each with its tokens."""
    pieces: list[Piece] = []
    first = 0
    for i, token in enumerate(completion.tokens):
        if token.text:
            pieces.append(Piece(token.text, first, i))
            first = i + 1
    return pieces


def _answer(completion: Completion, origins: Sequence[Origin] | None, parting: int | None) -> Text:
    text = Text()
    for words, first, last in pieces_of(completion):
        gain = sum(own.gain for own in origins[first : last + 1]) if origins else 0.0
        style = FROM_CONTEXT if gain > THRESHOLD else FROM_MEMORY if gain < -THRESHOLD else ""
        if parting is not None and first <= parting <= last:
            text.append(PARTS, "red")
        text.append(words, style)
    return text


def _candidates(completion: Completion, tokenizer: Any) -> Text:
    """Return the likeliest first tokens, one a line, cut off where the column is narrow."""
    text = Text(no_wrap=True, overflow="ellipsis").append("first token", "dim")
    for token, logprob in completion.tokens[0].top[:N_CANDIDATES]:
        share = math.exp(logprob)
        name = tokenizer.decode([token]).strip() or "␣"
        blocks = "█" * round(share * BAR) or "▏"
        text.append(f"\n{blocks:{BAR}}", COLOURS[completion.steering.target])
        text.append(f"{share:4.0%} {name}" if share >= 0.005 else f" <1% {name}")
    return text


def _parting(found: dict[SteerTarget, Completion]) -> int | None:
    """Return the first token in which memory and context differ."""
    if not {"parametric", "context"} <= found.keys():
        return None
    pairs = zip(found["parametric"].token_ids, found["context"].token_ids, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), None)


def _verdict(found: dict[SteerTarget, Completion]) -> str:
    texts = {target: own.text.strip() for target, own in found.items()}
    if len(texts) < len(TITLES):
        return "One of the two targets has no head set of its name."
    if texts["parametric"] == texts["context"]:
        return "Memory and context say the same: no conflict, or none that these heads decide."
    if texts["none"] == texts["context"]:
        return "Unsteered, this model believes what it was given here."
    if texts["none"] == texts["parametric"]:
        return "Unsteered, this model trusts its memory here."
    return "Unsteered, this model says something other than either."


def _legend(*, has_origins: bool, has_parting: bool) -> Text:
    legend = Text()
    if has_origins:
        legend.append("likelier with the context", FROM_CONTEXT).append("  ")
        legend.append("likelier without it", FROM_MEMORY)
        legend.append(f", by more than {THRESHOLD:g} nat as the unsteered model reads it")
    else:
        legend.append("Without a --context apart, tokens have no colour")
    if has_parting:
        legend.append("; ").append(PARTS, "red").append(" here memory and context part")
    return legend
