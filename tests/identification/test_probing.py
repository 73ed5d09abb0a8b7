"""The scores of heads against the naive loop, and probes that share the clean run."""

from __future__ import annotations

import pytest
import torch

import juice
from juice.head_set.scores import HeadScores
from juice.identification.probes import CleanRun, Prober, score_heads
from juice.loading import prepare
from juice.model import definition
from tests.support import naive_scores, tiny
from tests.support.conflicts import ALPHAS_MINUS, ALPHAS_PLUS, TOLERANCE, TYPES, examples
from tests.support.marks import ONE_SHAPE


@pytest.mark.parametrize("shape", ONE_SHAPE)
def test_scores_equal_a_forward_for_every_head_and_alpha(shape: str) -> None:
    """Kills: a head off by one, alpha without the one, another prompt's position, mixed probes."""
    network, tokenizer = tiny.tiny_model(shape), tiny.tiny_tokenizer()
    expected = {
        (target, sign): torch.stack(
            [
                naive_scores.mean_changes(
                    network,
                    [tokenizer(e.prompts[t])["input_ids"] for e in examples()],
                    [tokenizer(f" {e.answer(target)}")["input_ids"][0] for e in examples()],
                    alphas,
                )
                for t in TYPES
            ]
        )
        for target in ("parametric", "context")
        for sign, alphas in (("plus", ALPHAS_PLUS), ("minus", ALPHAS_MINUS))
    }
    model = juice.load(network, tokenizer=tokenizer)
    scores = score_heads(
        model,
        examples(),
        targets={"parametric": TYPES, "context": TYPES},
        alphas_plus=ALPHAS_PLUS,
        alphas_minus=ALPHAS_MINUS,
    )
    for (target, sign), table in expected.items():
        torch.testing.assert_close(getattr(scores[target], sign), table, rtol=0, atol=TOLERANCE)
        assert table.abs().max() > 10 * TOLERANCE


def context_scores(model: juice.SteeredModel) -> HeadScores:
    return score_heads(
        model,
        examples(),
        targets={"context": TYPES},
        alphas_plus=ALPHAS_PLUS,
        alphas_minus=ALPHAS_MINUS,
    )["context"]


@pytest.mark.parametrize("n_probes", [1, 3])
def test_a_large_vocabulary_takes_fewer_probes_at_a_time(
    n_probes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: the logits of all probes at once, which take gigabytes; an unscaled row too many."""
    network, rows = tiny.tiny_model("llama"), list[int]()
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    network.get_output_embeddings().register_forward_hook(
        lambda _m, args, _logits: rows.append(args[0][..., 0].numel())
    )

    def scores() -> HeadScores:
        rows.clear()
        return context_scores(model)

    together, n = scores(), (1 + n_probes) * len(examples())
    assert max(rows) > n
    monkeypatch.setattr(definition, "MOST_LOGITS", n * network.config.vocab_size)
    apart = scores()
    assert max(rows) == n
    for sign in ("plus", "minus"):
        both = getattr(together, sign), getattr(apart, sign)
        torch.testing.assert_close(*both, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_probes_that_share_the_clean_run_equal_whole_forwards(shape: str) -> None:
    model = juice.load(tiny.tiny_model(shape), tokenizer=tiny.tiny_tokenizer())
    with torch.inference_mode():
        clean = CleanRun(model.loaded, [(1, 2, 3), tuple(range(4, 20)), (7,)])
        prober = Prober(model.loaded, clean)
        assert prober.shares_clean_run
        for layer in range(tiny.N_LAYERS):
            factors = 1 + torch.randn(
                5, tiny.N_HEADS, generator=torch.Generator().manual_seed(layer)
            )
            shared = prober.logits(layer, factors)
            prober.shares_clean_run = False
            whole = prober.logits(layer, factors)
            prober.shares_clean_run = True
            torch.testing.assert_close(shared, whole, rtol=0, atol=1e-4)
            assert (shared - clean.logits).abs().max() > 0.01


def test_probes_fall_back_to_whole_forwards_where_a_layer_hides_something_from_its_inputs() -> None:
    """A layer that adds something to the residual stream by a hook cannot be entered half-way."""
    network = tiny.tiny_model("llama")
    network.model.layers[2].register_forward_hook(lambda _m, _a, out: out + 0.1 * out.shape[0])
    loaded = prepare(network, tiny.tiny_tokenizer())
    with torch.inference_mode():
        prober = Prober(loaded, CleanRun(loaded, [(1, 2, 3), (4, 5)]))
    assert not prober.shares_clean_run


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_a_head_without_effect_scores_nothing_however_a_forwards_shape_rounds(shape: str) -> None:
    """Kills: a reference from a forward of another shape, whose rounding would pass for an effect.

    Half precision rounds by the number of rows on some machines; here every model does, by a lot.
    """
    network = tiny.tiny_model(shape)
    layers = network.transformer.h if shape == "gpt2" else network.model.layers
    with torch.no_grad():
        for layer in layers[1:]:
            # The rows of the weights, or columns in GPT-2's order, that head 1 goes through.
            if shape == "gpt2":
                layer.attn.c_proj.weight[8:16] = 0
            else:
                layer.self_attn.o_proj.weight[:, 8:16] = 0
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    network.get_output_embeddings().register_forward_hook(
        lambda _m, args, logits: logits + torch.sin(torch.arange(logits.shape[-1]) + len(args[0]))
    )
    scores = context_scores(model)
    for table in (scores.plus, scores.minus):
        assert table[:, 1:, 1].abs().max() < 1e-7
        assert table.abs().max() > 1e-3


def test_probing_scales_are_not_rounded_to_the_models_dtype() -> None:
    """In bfloat16 1 + 0.3 is 1.296875; the product is rounded once, as in the engine."""
    loaded = prepare(tiny.tiny_model("llama").bfloat16(), tiny.tiny_tokenizer())
    seen: list[torch.Tensor] = []
    factors = torch.tensor([[1.0, 1.3, 1.0, 1.0]])
    with torch.inference_mode():
        prober = Prober(loaded, CleanRun(loaded, [(1, 2, 3)]))
        assert prober.shares_clean_run
        projection = loaded.layout.layers[1].projection
        handle = projection.register_forward_hook(lambda _m, args, _out: seen.append(args[0]))
        prober.logits(1, torch.ones(1, tiny.N_HEADS))
        prober.logits(1, factors)
        handle.remove()
    plain, scaled = (z.view(3, tiny.N_HEADS, -1) for z in seen)
    assert torch.equal(scaled, (plain.float() * factors[0, :, None]).bfloat16())
    assert not torch.equal(scaled, plain * factors[0, :, None].bfloat16())
