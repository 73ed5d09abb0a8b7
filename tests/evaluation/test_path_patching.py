"""PH3's head scores against path patching written out, and the pruning of the heads it finds."""

from __future__ import annotations

import pytest
import torch

import juice
from juice.engine.steer import Steer
from juice.errors import JuiceError
from juice.evaluation.choices import pruning
from juice.evaluation.path_patching import Patch, counterpart, patches, patching_scores, ranked
from juice.head_set.schema import Head
from tests.support import oracle, tiny

# fp32, natural logarithms: sums at one position and over a whole prompt differ in order.
TOLERANCE = 1e-4


def naive_scores(network, made: list[Patch]) -> torch.Tensor:
    """Return the scores [n_layers, n_heads] of patching one head at a time.

    z of all other heads is put back at every position, so that only MLPs see the change.
    """
    n_layers, n_heads = tiny.N_LAYERS, tiny.N_HEADS
    total = torch.zeros(n_layers, n_heads)

    def log_odds(logits: torch.Tensor, patch: Patch) -> torch.Tensor:
        logprobs = logits[-1].log_softmax(-1)
        return logprobs[patch.context_token] - logprobs[patch.parametric_token]

    for patch in made:
        clean_logits, z = oracle.forward(network, list(patch.ids))
        _, other = oracle.forward(network, list(patch.other_ids))
        for layer in range(n_layers):
            d_head = z[layer].shape[-1] // n_heads
            for head in range(n_heads):
                columns = slice(head * d_head, (head + 1) * d_head)
                frozen = [of_heads.clone() for of_heads in z]
                frozen[layer][-1, columns] = other[layer][-1, columns]
                change = {i: lambda _z, kept=kept: kept[None] for i, kept in enumerate(frozen)}
                patched, _ = oracle.forward(network, list(patch.ids), change)
                total[layer, head] += log_odds(patched, patch) - log_odds(clean_logits, patch)
    return total / len(made)


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_scores_equal_path_patching_written_out(shape: str) -> None:
    """Kills: a head off by one, x and x' swapped, attention that recomputes, inverted log odds."""
    network = tiny.tiny_model(shape)
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    made = [
        Patch((5, 9, 40, 7, 8), (5, 9, 41, 7, 8), 30, 31),
        Patch((1, 2, 3), (11, 12, 13, 14, 15, 16, 3), 50, 12),
    ]
    scores = patching_scores(model, made)
    expected = naive_scores(network, made)
    torch.testing.assert_close(scores, expected, rtol=0, atol=TOLERANCE)
    assert expected.abs().max() > 100 * TOLERANCE
    assert ranked(scores)[0] == Head(*divmod(int(expected.argmin()), tiny.N_HEADS))


def test_a_counterpart_is_about_another_subject_and_answer() -> None:
    peru = juice.ConflictExample(
        subject="Peru",
        parametric_answer="Lima",
        context_answer="Oslo",
        prompts={"substitution": "Oslo rules Peru. Peruvian Peru is"},
    )
    mali = juice.ConflictExample(
        subject="Mali", parametric_answer="Bamako", context_answer="Rome", prompts={"clean": "x"}
    )
    assert counterpart(peru, mali, "substitution") == "Rome rules Mali. Peruvian Mali is"


def test_patches_pair_examples_of_one_relation() -> None:
    model = juice.load("mini")
    pool = juice.read_examples("mini")
    examples = [
        *[e for e in pool if e.relation == "world_capital"][:3],
        *[e for e in pool if e.relation == "book_author"][:3],
    ]
    made = patches(model, examples, "substitution", seed=0)
    assert len(made) == 6
    capitals = {t for e in examples[:3] for t in model.tokenize(f" {e.subject}")}
    assert all(set(patch.other_ids) & capitals for patch in made[:3])
    with pytest.raises(JuiceError, match="no example"):
        patching_scores(model, [])


def test_pruned_heads_add_nothing_to_the_stream() -> None:
    network = tiny.tiny_model("llama")
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    ids = [9, 8, 7, 6]
    steering = model.resolve(pruning(model, [Head(1, 2), Head(3, 0)], "context"))
    watched = model.engine.generate(
        [
            model.request(ids, max_tokens=1, watch=tuple(range(tiny.VOCAB_SIZE))).with_steering(
                steering
            )
        ]
    )[0].watched

    def without(head: int):
        def cut(z: torch.Tensor) -> torch.Tensor:
            d_head = z.shape[-1] // tiny.N_HEADS
            z[..., head * d_head : (head + 1) * d_head] = 0
            return z

        return cut

    logits, _ = oracle.forward(network, ids, {1: without(2), 3: without(0)})
    torch.testing.assert_close(torch.tensor(watched), logits[-1].log_softmax(-1), rtol=0, atol=1e-5)
    assert steering.report.method == Steer(target="context", method="june").method
