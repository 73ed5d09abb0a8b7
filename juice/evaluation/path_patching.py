"""PH3's head scores by path patching, as method.md describes them.

x is a conflict prompt, x' the same prompt with another example's subject and context answer. For
each head h:

    run x with z_h <- z_h(x') at the last position, z of every other head frozen to its value in x,
        MLPs recomputed
    score(h) = mean over examples of the change of
               log p(context answer) - log p(parametric answer)

so only what h sends to the output, directly or through MLPs, counts. Heads that lower the
difference most are context heads, heads that raise it most are memory heads. With z frozen, only
the last position's residual stream matters: one token per head goes through the model, with every
layer's z given.

Source: Jin et al., "Cutting Off the Head Ends the Conflict" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch

from juice.checks.two_runs import bound_of
from juice.data.example import ConflictExample
from juice.data.passages import swapped
from juice.errors import JuiceError
from juice.formula import ConflictType
from juice.head_set.schema import Head
from juice.identification.examples import scored_prompt
from juice.model.definition import PaddedPrompts
from juice.model.layout import AttentionLayer
from juice.model.loaded import LoadedModel
from juice.model.steering_hooks import at_z
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

N_ROWS = 512


@dataclass(frozen=True)
class Patch:
    """One example: the prompts x and x' as tokens, and the first token of each answer."""

    ids: tuple[int, ...]
    other_ids: tuple[int, ...]
    context_token: int
    parametric_token: int


def counterpart(
    example: ConflictExample, other: ConflictExample, conflict_type: ConflictType
) -> str:
    """Return an example's prompt with another example's subject and context answer.

    Only whole words are replaced.
    """
    return _renamed(example.prompts[conflict_type], example, other)


def _renamed(text: str, example: ConflictExample, other: ConflictExample) -> str:
    new = {
        example.subject: other.subject,
        **dict.fromkeys(example.context_answer, other.context_answer[0]),
    }
    return swapped(text, new)


def patches(
    model: SteeredModel, examples: Sequence[ConflictExample], conflict_type: ConflictType, seed: int
) -> list[Patch]:
    """Pair every example with another one, of its relation where there is one.

    Examples without such a prompt, or in whose prompt nothing can be replaced, are left out.
    """
    rng, made = Random(seed), []
    for example in (e for e in examples if conflict_type in e.prompts):
        others = [
            e
            for e in examples
            if e.subject != example.subject and e.context_answer[0] != example.context_answer[0]
        ]
        others = [e for e in others if e.relation == example.relation] or others
        if not others:
            continue
        other = rng.choice(others)
        prompt = counterpart(example, other, conflict_type)
        if prompt != example.prompts[conflict_type]:
            scored = scored_prompt(model, example, conflict_type)
            tokens = scored.answer_tokens
            opening = _renamed(example.opening, example, other)
            other_ids = model.prompts.tokens(prompt, opening)
            made.append(Patch(scored.ids, other_ids, tokens["context"], tokens["parametric"]))
    return made


@torch.inference_mode()
def patching_scores(
    model: SteeredModel, made: Sequence[Patch], progress: Progress = silent
) -> torch.Tensor:
    """Return the scores of all heads, float32 [n_layers, n_heads].

    Raises JuiceError without patches, and for a model whose last position cannot be run alone.
    """
    if not made:
        raise JuiceError(
            "path patching has no example: no prompt names a subject or an answer "
            "that another example's can replace"
        )
    loaded, layout = model.loaded, model.loaded.layout
    total = torch.zeros(layout.n_layers, layout.n_heads)
    heads = [Head(layer.index, index) for layer in layout.layers for index in range(layer.n_heads)]
    with loaded.turn, progress("patching heads", len(made)) as advance:
        for patch in made:
            z, logits = _last_position(loaded, patch.ids)
            other, _ = _last_position(loaded, patch.other_ids)
            both = [patch.context_token, patch.parametric_token]
            wanted = torch.tensor(both, device=loaded.device)
            unpatched = _log_odds(_forward_one(loaded, patch.ids, z), wanted)
            difference = (unpatched - _log_odds(logits[None], wanted)).abs().max()
            if difference > bound_of(loaded.describe()):
                raise JuiceError(
                    f"{type(loaded.model).__name__} cannot be patched: a prompt's last "
                    "position gives another result when it is run alone"
                )
            for start in range(0, len(heads), N_ROWS):
                chunk = heads[start : start + N_ROWS]
                changed = _log_odds(_forward_one(loaded, patch.ids, z, chunk, other), wanted)
                for head, change in zip(chunk, (changed - unpatched).tolist(), strict=True):
                    total[head] += change
            advance(1)
    return total / len(made)


def ranked(scores: torch.Tensor) -> list[Head]:
    """Return all heads, context heads first: by ascending score, then by (layer, head)."""
    heads = [Head(layer, index) for layer in range(len(scores)) for index in range(scores.shape[1])]
    return sorted(heads, key=lambda head: (float(scores[head]), head))


def _log_odds(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return log p(context answer) - log p(parametric answer), [rows], from [rows, vocab]."""
    logprobs = logits.log_softmax(-1)[:, tokens]
    return (logprobs[:, 0] - logprobs[:, 1]).cpu()


def _last_position(
    loaded: LoadedModel, ids: tuple[int, ...]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run a prompt; return its last position's z, [n_heads, d_head] a layer, and logits [vocab]."""
    kept: list[torch.Tensor] = []

    def keep(layer: AttentionLayer, z: torch.Tensor) -> None:
        kept.append(z[0, -1].view(layer.n_heads, -1))

    with at_z(loaded.layout.layers, keep):
        logits = PaddedPrompts(loaded, [ids]).logits()[0]
    return kept, logits


def _forward_one(
    loaded: LoadedModel,
    ids: tuple[int, ...],
    z: list[torch.Tensor],
    heads: Sequence[Head] = (),
    other: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Run the last token alone with every layer's z given; return logits [rows, vocabulary].

    There is a row for each of `heads`, whose z is that of the other run; without heads one row.
    """
    n_rows, given = max(1, len(heads)), []
    for layer, of_heads in enumerate(z):
        rows = of_heads.expand(n_rows, *of_heads.shape).clone()  # [row, head, d_head]
        for row, head in enumerate(heads):
            if head.layer == layer:
                rows[row, head.index] = other[layer][head.index]
        given.append(rows.flatten(1)[:, None])
    tokens = torch.full((n_rows, 1), ids[-1], device=loaded.device)
    with at_z(loaded.layout.layers, lambda layer, _z: given[layer.index]):
        logits: torch.Tensor = loaded.run(
            input_ids=tokens, position_ids=torch.full_like(tokens, len(ids) - 1), use_cache=False
        ).logits
    return logits[:, 0].float()
