"""Identification against the naive loop, the rules of selection, and the choice of tuning."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

import juice
from juice.data.example import ConflictExample
from juice.errors import ExampleError, NoConsistentHeadError, UsageError
from juice.head_set import HeadScores
from juice.identification import IdentificationOptions, run, validation
from juice.identification.drawing import usable_examples
from juice.identification.probe import CleanRun, Prober
from juice.identification.probing import score_heads
from juice.identification.scored_prompt import scored_prompt
from juice.identification.selection import chosen_heads
from juice.identification.trials import answer, outcome
from juice.identification.tuning import GRID_MINUS, GRID_PLUS
from juice.loading.prepared import prepare
from tests.support import naive_scores, tiny
from tests.support.conflicts import ALPHAS_MINUS, ALPHAS_PLUS, TOLERANCE, TYPES, examples


@pytest.mark.parametrize("shape", tiny.SHAPES)
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


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_probes_that_share_the_clean_run_equal_whole_forwards(shape: str) -> None:
    model = juice.load(tiny.tiny_model(shape), tokenizer=tiny.tiny_tokenizer())
    with torch.inference_mode():
        prober = Prober(
            model.loaded, CleanRun(model.loaded, [(1, 2, 3), tuple(range(4, 20)), (7,)])
        )
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
            assert (shared - prober._clean.logits).abs().max() > 0.01


def test_probes_fall_back_to_whole_forwards_where_a_layer_hides_something_from_its_inputs() -> None:
    """A layer that adds something to the residual stream by a hook cannot be entered half-way."""
    network = tiny.tiny_model("llama")
    network.model.layers[2].register_forward_hook(lambda _m, _a, out: out + 0.1 * out.shape[0])
    loaded = prepare(network, tiny.tiny_tokenizer())
    with torch.inference_mode():
        prober = Prober(loaded, CleanRun(loaded, [(1, 2, 3), (4, 5)]))
    assert not prober.shares_clean_run


def test_the_filter_requires_every_type_above_zero_and_ties_go_to_the_lower_head() -> None:
    plus = torch.tensor([[[0.2, 0.1, 0.0], [0.3, -0.1, 0.1]], [[0.1, 0.2, 0.5], [-0.1, 0.9, 0.2]]])
    minus = torch.zeros(2, 2, 3)
    best, none = juice.select_heads(plus, minus, top_k=2)
    # L0H0, L0H1 and L1H2 all sum to 0.3; L0H2 has a zero, L1H0 and L1H1 a negative score.
    assert best == [(0, 0), (0, 1)]
    assert none == []


@given(st.integers(1, 6), st.integers(0, 2**31))
def test_selection_equals_a_slow_enumeration(top_k: int, seed: int) -> None:
    scores = torch.randint(-2, 4, (3, 3, 4), generator=torch.Generator().manual_seed(seed)).float()
    kept = [
        (h, sum(scores[j, h[0], h[1]].item() for j in range(3)))
        for h in [(a, b) for a in range(3) for b in range(4)]
        if all(scores[j, h[0], h[1]] > 0 for j in range(3))
    ]
    expected = []
    while kept and len(expected) < top_k:
        best = max(kept, key=lambda item: item[1])  # the first of equals
        kept.remove(best)
        expected.append(best[0])
    assert juice.select_heads(scores, -scores, top_k=top_k)[0] == expected


def test_the_error_without_a_head_of_either_sign_suggests_what_to_try() -> None:
    empty = HeadScores(
        target="context",
        conflict_types=("substitution",),
        plus=torch.zeros(1, 2, 2),
        minus=torch.zeros(1, 2, 2),
    )
    with pytest.raises(NoConsistentHeadError, match=r"gentler alphas .* more examples"):
        chosen_heads(empty, 5)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"top_k": 0}, "top_k"),
        ({"alphas_plus": (1.0, -2.0)}, "alphas_plus"),
        ({"alphas_minus": (2.0,)}, "alphas_minus"),
        ({"alphas_plus": ()}, "alphas_plus"),
    ],
)
def test_options_of_the_wrong_sign_or_size_are_refused(
    wrong: dict[str, object], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        IdentificationOptions(**wrong)


def test_examples_that_cannot_be_scored_are_skipped_and_counted() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    pool = examples()
    same_start = pool[0].model_copy(update={"context_answer": ("Prague",)})
    with pytest.warns(UserWarning, match="1 examples cannot be scored"):
        drawn, rest = usable_examples(
            model, [same_start, *pool], IdentificationOptions(n_examples=4)
        )
    assert drawn == pool
    assert rest == [same_start]
    with (
        pytest.warns(UserWarning, match="not drawn"),
        pytest.raises(ExampleError, match="5 examples were requested, 4 can be used"),
    ):
        usable_examples(model, [same_start, *pool], IdentificationOptions(n_examples=5))


def test_an_answer_without_tokens_of_its_own_cannot_be_scored() -> None:
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tokenizer)
    nothing = examples()[0].model_copy(update={"context_answer": ("~~",)})
    with pytest.raises(ExampleError, match=r"context answer '~~' has no tokens"):
        scored_prompt(model, nothing, "clean")


def test_an_example_without_a_prompt_that_others_have_is_not_drawn() -> None:
    """Otherwise one such example would silently drop a conflict type from the filter."""
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    pool = examples()
    partial = pool[0].model_copy(update={"prompts": {"clean": pool[0].prompts["clean"]}})
    with pytest.warns(UserWarning, match="no coherent and no substitution prompt"):
        drawn, _ = usable_examples(model, [partial, *pool[1:]], IdentificationOptions(n_examples=3))
    assert drawn == pool[1:]
    with pytest.raises(ExampleError, match="no conflict for the parametric target"):
        juice.identify(model, [partial], target="parametric", n_examples=1)


def test_a_target_without_heads_does_not_fail_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scored(*_args: object, **_options: object) -> dict[str, HeadScores]:
        table = torch.zeros(2, tiny.N_LAYERS, tiny.N_HEADS)
        good = table.clone()
        good[:, 1, 2] = 0.5
        types = ("substitution", "coherent")
        return {
            t: HeadScores(target=t, conflict_types=types, plus=p, minus=table)
            for t, p in (("parametric", table), ("context", good))
        }

    monkeypatch.setattr(run, "score_heads", scored)
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    names = {"parametric": "parametric", "context": "context"}
    with pytest.warns(UserWarning, match="no head raises the probability of the parametric answer"):
        found = run.identify_targets(
            model, examples(), ["parametric", "context"], IdentificationOptions(), names=names
        )
    assert list(found) == ["context"]
    assert found["context"].heads.plus == (juice.Head(1, 2),)
    with pytest.raises(NoConsistentHeadError):
        run.identify_targets(
            model, examples(), ["parametric"], IdentificationOptions(), names=names
        )


def test_scores_that_overflow_are_an_error_not_a_head_set() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    with pytest.raises(juice.JuiceError, match="not finite"):
        juice.identify(model, examples(), target="context", alphas_plus=(1e38, 1.0))


def test_identification_is_the_same_for_the_same_seed_and_differs_for_another() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    options = {
        "target": "context",
        "n_examples": 2,
        "alphas_plus": ALPHAS_PLUS,
        "alphas_minus": ALPHAS_MINUS,
    }
    first, again, other = (
        juice.identify(model, examples(), seed=seed, **options) for seed in (0, 0, 3)
    )
    assert first.model_dump() == again.model_dump()
    assert first.identification.examples_sha256 != other.identification.examples_sha256


def test_tuning_takes_the_best_pair_of_the_whole_grid() -> None:
    """The oracle walks the grid itself.

    The answers of a random model are arbitrary text, so those of one pair of betas are taken as the
    accepted ones, for accuracies to differ.
    """
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    head_set = model.make_head_set(name="t", target="context", plus=[(0, 1)], minus=[(2, 2)])
    prompts = [p for e in examples() for p in e.prompts.values()]
    wanted = [
        c.text
        for c in model.generate(
            prompts,
            steer=juice.Steer(target="context", beta_plus=3, beta_minus=-2),
            head_set=head_set,
            max_tokens=15,
        )
    ]
    validation = [
        ConflictExample(
            subject="x", parametric_answer="~", context_answer=text, prompts={"substitution": p}
        )
        for p, text in zip(prompts, wanted, strict=True)
        if text.split() and juice.data.judging.normalise(text)
    ]
    with pytest.warns(UserWarning, match="examples tune the betas"):
        tuned = juice.tune(model, head_set, validation)
    sums = {}
    for plus in GRID_PLUS:
        for minus in GRID_MINUS:
            steer = juice.Steer(target="context", beta_plus=plus, beta_minus=minus)
            answers = answer(
                model,
                validation,
                ["substitution"],
                "context",
                model.resolve(replace(steer, head_set=head_set)),
            )
            sums[plus, minus] = outcome(validation, answers, "context")
    best = tuned.betas()
    assert sums[best.plus, best.minus].rank == max(o.rank for o in sums.values())
    assert tuned.metrics["validation_juice"]["accuracy"] == sums[best.plus, best.minus].accuracy
    assert len({o.accuracy["substitution"] for o in sums.values()}) > 1


def test_every_example_is_judged_by_its_own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    fact = {
        "subject": "x",
        "parametric_answer": "sea",
        "context_answer": "sand",
        "prompts": {"clean": "the river runs to"},
    }
    pair = [ConflictExample(**fact, match=match) for match in ("contains", "begins")]
    answers = {"clean": [SimpleNamespace(text=" the sea", watched=())] * 2}
    assert outcome(pair, answers, "parametric").accuracy == {"clean": 0.5}
    monkeypatch.setattr(validation, "answer", lambda *_: answers)
    assert validation.known_examples(None, pair) == pair[:1]
