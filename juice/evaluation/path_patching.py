"""PH3's head scores by path patching (Jin et al., "Cutting Off the Head Ends the Conflict", 2024), as method.md reads it.

x is a conflict prompt, x' the same prompt about another example's subject and context answer. For
each head h:

    run x with z_h <- z_h(x') at the last position, z of every other head frozen to its value in x,
    MLPs recomputed score(h) = mean over examples of the change of log p(context answer) - log
    p(parametric answer)

so that only what h sends to the output directly or through MLPs counts. Heads that lower it most
are context heads, heads that raise it most are memory heads. With z frozen nothing but the last
position's residual stream matters: one token a head goes through the model, each layer's z put in
its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from juice.data.example import ConflictExample, ConflictType
from juice.errors import JuiceError
from juice.head_set import Head
from juice.identification.scored_prompt import scored_prompt
from juice.model.loaded import LoadedModel
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

N_ROWS = 512
# Natural log units, on the logits' scale: what a forward of one position may differ from the whole
# prompt's.
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


@dataclass(frozen=True)
class Patch:
    """One example: the prompt x and its counterpart x' as tokens, and the first tokens of both answers."""

    ids: tuple[int, ...]
    other_ids: tuple[int, ...]
    context_token: int
    parametric_token: int


def counterpart(
    example: ConflictExample, other: ConflictExample, conflict_type: ConflictType
) -> str:
    """Return the example's prompt with its subject and context answers, as whole words, replaced by another example's."""
    new = {
        example.subject: other.subject,
        **dict.fromkeys(example.context_answer, other.context_answer[0]),
    }
    old = re.compile(
        "|".join(rf"(?<!\w){re.escape(text)}(?!\w)" for text in sorted(new, key=len, reverse=True))
    )
    return old.sub(lambda match: new[match.group()], example.prompts[conflict_type])


def patches(
    model: SteeredModel, examples: Sequence[ConflictExample], conflict_type: ConflictType, seed: int
) -> list[Patch]:
    """Pair every example with another one of its relation, where there is one; those that nothing can be replaced in are left out."""
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
        prompt = counterpart(example, rng.choice(others), conflict_type)
        if prompt != example.prompts[conflict_type]:
            scored = scored_prompt(model, example, conflict_type)
            tokens = scored.answer_tokens
            made.append(
                Patch(
                    scored.ids,
                    model.prompts.tokens(prompt),
                    tokens["context"],
                    tokens["parametric"],
                )
            )
    return made


@torch.inference_mode()
def patching_scores(
    model: SteeredModel, made: Sequence[Patch], progress: Progress = silent
) -> torch.Tensor:
    """Return the scores of all heads, float32 [n_layers, n_heads].

    Raises JuiceError for no patches, and for a model whose last position cannot be run alone.
    """
    if not made:
        raise JuiceError(
            "path patching has no example: none has another one's subject and answer to put in"
            " place of its own"
        )
    loaded, layout = model.loaded, model.loaded.layout
    total = torch.zeros(layout.n_layers, layout.n_heads)
    heads = [Head(layer.index, index) for layer in layout.layers for index in range(layer.n_heads)]
    with loaded.turn, progress("patching heads", len(made)) as advance:
        for patch in made:
            z, logits = _last_position(loaded, patch.ids)
            other, _ = _last_position(loaded, patch.other_ids)
            wanted = torch.tensor(
                [patch.context_token, patch.parametric_token], device=loaded.device
            )
            unpatched = _log_odds(_forward_one(loaded, patch.ids, z, {}, 1), wanted)
            if (unpatched - _log_odds(logits[None], wanted)).abs().max() > TOLERANCES.get(
                loaded.dtype, 0.3
            ):
                raise JuiceError(
                    f"{type(loaded.model).__name__} does not give the same at a prompt's last"
                    " position alone: it cannot be patched"
                )
            for start in range(0, len(heads), N_ROWS):
                chunk = heads[start : start + N_ROWS]
                changed = _log_odds(
                    _forward_one(
                        loaded,
                        patch.ids,
                        z,
                        {i: (h, other) for i, h in enumerate(chunk)},
                        len(chunk),
                    ),
                    wanted,
                )
                for head, change in zip(chunk, (changed - unpatched).tolist(), strict=True):
                    total[head] += change
            advance(1)
    return total / len(made)


def ranked(scores: torch.Tensor) -> list[Head]:
    """Return all heads, context heads first: by rising score, ties to the lower (layer, head)."""
    heads = [Head(layer, index) for layer in range(len(scores)) for index in range(scores.shape[1])]
    return sorted(heads, key=lambda head: (float(scores[head]), head))


def _log_odds(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return log p(context answer) - log p(parametric answer), [rows]; logits: [rows, vocabulary]."""
    logprobs = logits.log_softmax(-1)[:, tokens]
    return (logprobs[:, 0] - logprobs[:, 1]).cpu()


def _last_position(
    loaded: LoadedModel, ids: tuple[int, ...]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run a prompt; return z of its last position, a layer [n_heads, d_head], and the logits there, [vocabulary]."""
    kept: list[torch.Tensor] = []
    with ExitStack() as stack:
        for layer in loaded.layout.layers:

            def keep(_module: Any, args: tuple[Any, ...], n_heads: int = layer.n_heads) -> None:
                kept.append(args[0][0, -1].view(n_heads, -1))

            stack.callback(layer.projection.register_forward_pre_hook(keep).remove)
        tokens = torch.tensor([ids], device=loaded.device)
        rows, last = (
            torch.tensor([0], device=loaded.device),
            torch.tensor([len(ids) - 1], device=loaded.device),
        )
        with loaded.logits.keep(rows, last, len(ids)):
            logits = loaded.run(input_ids=tokens, use_cache=False).logits[0, 0].float()
    return kept, logits


def _forward_one(
    loaded: LoadedModel,
    ids: tuple[int, ...],
    z: list[torch.Tensor],
    patched: dict[int, tuple[Head, list[torch.Tensor]]],
    n_rows: int,
) -> torch.Tensor:
    """Run the last token alone with every layer's z given, in row i one head's taken from elsewhere; return logits [rows, vocabulary]."""
    given = []
    for layer, own in enumerate(z):
        rows = own.expand(n_rows, *own.shape).clone()  # [row, head, d_head]
        for row, (head, other) in patched.items():
            if head.layer == layer:
                rows[row, head.index] = other[layer][head.index]
        given.append(rows.flatten(1)[:, None])
    tokens = torch.full((n_rows, 1), ids[-1], device=loaded.device)
    with _given(loaded, given):
        logits: torch.Tensor = loaded.run(
            input_ids=tokens, position_ids=torch.full_like(tokens, len(ids) - 1), use_cache=False
        ).logits
    return logits[:, 0].float()


@contextmanager
def _given(loaded: LoadedModel, z: list[torch.Tensor]) -> Iterator[None]:
    """Put z [rows, 1, n_heads * d_head] in the place of what each layer's attention computes."""
    with ExitStack() as stack:
        for layer, own in zip(loaded.layout.layers, z, strict=True):

            def put(
                _module: Any, args: tuple[Any, ...], own: torch.Tensor = own
            ) -> tuple[Any, ...]:
                return (own, *args[1:])

            stack.callback(layer.projection.register_forward_pre_hook(put).remove)
        yield
