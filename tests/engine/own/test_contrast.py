"""Context-aware decoding as two coupled rows of a batch equals two uncached forwards per token."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch

import juice
from juice.engine.load_options import Limits
from juice.engine.own.contrast import Mixer
from juice.engine.own.thread import BatchingEngine
from juice.engine.request import Contrast, Request
from juice.engine.structure import Structure
from juice.errors import NonFiniteError, RequestError
from juice.formula import CONTRASTS
from tests.support import oracle, tiny
from tests.support.mixed import TOLERANCE, mixed_requests
from tests.support.running import Collector, assert_completes, loaded

CAD = juice.Steer(target="context", method="cad")


def contrasts(n: int = 10) -> list[Request]:
    rng, made = Random(3), []
    for i in range(n):
        method = [*CONTRASTS][i % len(CONTRASTS)]
        ids, without = (
            tuple(rng.randrange(1, tiny.VOCAB_SIZE) for _ in range(rng.choice([1, 3, 11, 28])))
            for _ in range(2)
        )
        contrast = Contrast(
            prompt_ids=without,
            method=method,
            target=rng.choice(CONTRASTS[method]),
            strength=rng.choice([0.5, 1.0] if method == "ckplug" else [0.5, 1.0, 3.0]),
        )
        watch = tuple(range(tiny.VOCAB_SIZE))
        made.append(
            Request.of(
                prompt_ids=ids,
                contrast=contrast,
                max_tokens=rng.choice([1, 5, 12]),
                ignore_eos=True,
                watch=watch,
            )
        )
    return made


@pytest.mark.parametrize(("max_batch", "max_prefill_tokens"), [(1, 7), (3, 60), (64, 2048)])
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_two_coupled_rows_equal_the_naive_contrast_among_steered_neighbours(
    shape: str, max_batch: int, max_prefill_tokens: int
) -> None:
    """Kills: the two logits swapped, the weight off by one, a row that misses a token; another
    divergence, or that of another token.

    The two prompts of a contrast may end in different chunks.
    """
    network = tiny.tiny_model(shape)
    expected = [
        oracle.generate_contrasted(
            network,
            list(r.prompt_ids),
            list(r.contrast.prompt_ids),
            r.options.max_tokens,
            method=r.contrast.method,
            target=r.contrast.target,
            strength=r.contrast.strength,
        )
        for r in contrasts()
    ]
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    engine = BatchingEngine(
        model.loaded, Limits(max_batch=max_batch, max_prefill_tokens=max_prefill_tokens)
    )
    neighbours = [request for request, _, _ in mixed_requests(seed=4)]
    completions = engine.generate([*contrasts(), *neighbours])[: len(expected)]
    for completion, each in zip(completions, expected, strict=True):
        assert_completes(completion, each, 5 * TOLERANCE)
    assert engine.status.n_running == engine.status.n_kv_bytes == 0


def test_a_contrast_is_one_request_of_the_batch_and_two_rows_of_the_memory() -> None:
    model = loaded()
    alone, both = (
        Request.of(prompt_ids=(1, 2, 3), max_tokens=5, contrast=c)
        for c in (None, Contrast(prompt_ids=(4, 5, 6)))
    )
    assert model.engine.n_kv_bytes(both) == 2 * model.engine.n_kv_bytes(alone)
    assert len(BatchingEngine(model.loaded, Limits(max_batch=1)).generate([both])) == 1


@pytest.mark.parametrize("when", ["prefill", "decoding"])
def test_a_cancelled_contrast_leaves_no_row_behind(when: str) -> None:
    model = loaded(limits=Limits(max_prefill_tokens=2))
    request = Request.of(
        prompt_ids=(1,) * 40,
        max_tokens=60,
        ignore_eos=True,
        contrast=Contrast(prompt_ids=(1,) * (3 if when == "prefill" else 39)),
    )
    collector = Collector()
    sent = model.engine.submit([request], collector)
    if when == "decoding":
        with collector.changed:
            assert collector.changed.wait_for(lambda: collector.updates, 60)
    sent[0].cancel()
    collector.wait(1)
    assert model.generate("still alive", max_tokens=2)
    assert model.engine.status.n_running == model.engine.status.n_kv_bytes == 0


@pytest.mark.parametrize("prompt_ids", [(1, 2), (299, 2)])
def test_a_contrast_whose_rows_fail_ends_alone(prompt_ids: tuple[int, int]) -> None:
    """Token 299 has no finite embedding: one row of the contrast has it, or both in one forward."""
    network = tiny.tiny_model("llama")
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    with torch.no_grad():
        network.model.embed_tokens.weight[299] = torch.nan
    poisoned = Request.of(
        prompt_ids=prompt_ids, contrast=Contrast(prompt_ids=(299, 3)), max_tokens=4
    )
    well = Request.of(
        prompt_ids=(1, 2, 3), contrast=Contrast(prompt_ids=(5, 6)), max_tokens=4, ignore_eos=True
    )
    collector = Collector()
    model.engine.submit([well, poisoned], collector)
    collector.wait(2)
    assert isinstance(collector.error(1), NonFiniteError)
    assert collector.completion(0).token_ids == model.engine.generate([well])[0].token_ids
    assert model.engine.status.n_running == model.engine.status.n_kv_bytes == 0


def test_a_separate_context_goes_before_the_prompt_and_is_weighted_by_the_strength() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    context, prompt, options = "Rome is told of.", "It is", {"max_tokens": 6, "ignore_eos": True}
    joined = model.generate(f"{context} {prompt}", **options)[0]
    assert model.generate(prompt, context=context, **options)[0].token_ids == joined.token_ids
    assert (
        model.generate(prompt, context=context, steer=CAD, strength=0.0, **options)[0].token_ids
        == joined.token_ids
    )
    strong = model.generate(
        [prompt, prompt], context=[context, context + "\n"], steer=CAD, strength=4.0, **options
    )
    ids, without = list(model.tokenize(f"{context} {prompt}")), list(model.tokenize(prompt))
    assert (
        list(strong[0].token_ids)
        == oracle.generate_contrasted(model.loaded.model, ids, without, 6, strength=4.0)[0]
    )
    assert strong[0].token_ids != joined.token_ids
    assert strong[0].steering.to_dict() == {
        "applied": True,
        "target": "context",
        "head_set": None,
        "beta_plus": 0.0,
        "beta_minus": 0.0,
        "strength": 4.0,
        "method": "cad",
        "n_heads": 0,
        "positions": "all",
        "gate": None,
        "exact": True,
        "effect": None,
        "warnings": (),
    }


def test_sampled_contrasts_are_the_same_alone_and_in_company() -> None:
    model = loaded("gpt2")
    sampling = {"temperature": 1.2, "seed": 5, "repetition_penalty": 1.3}
    request = Request.of(
        prompt_ids=(9, 8, 7), max_tokens=15, contrast=Contrast(prompt_ids=(7,)), **sampling
    )
    company = [r for r, _, _ in mixed_requests(seed=6)]
    alone = model.engine.generate([request])[0].token_ids
    assert (
        model.engine.generate([*company[:4], request, *company[4:], *contrasts()])[4].token_ids
        == alone
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"steer": CAD}, "needs the context separately"),
        (
            {
                "steer": juice.Steer(target="context", method="cad"),
                "head_set": "context",
                "context": "c",
            },
            "uses no heads",
        ),
        (
            {"steer": CAD, "context": "c", "prompt_logprobs": True, "max_tokens": 1},
            "new tokens only",
        ),
    ],
)
def test_what_cad_cannot_do_is_refused(options: dict, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        loaded("gpt2").request("a prompt", **options)


@pytest.mark.parametrize("method", CONTRASTS)
def test_a_contrast_has_its_targets_and_no_heads(method: str) -> None:
    targets = CONTRASTS[method]
    for target in {"context", "parametric"} - {*targets}:
        with pytest.raises(RequestError, match=f"steers toward {targets[0]} only"):
            juice.Steer(target=target, method=method)
    with pytest.raises(RequestError, match="steer is none"):
        juice.Steer(target="none", method=method)
    with pytest.raises(RequestError, match="beta_plus is given"):
        juice.Steer(target=targets[0], method=method, beta_plus=1.0)
    with pytest.raises(RequestError, match="one weight"):
        juice.Steer(target=targets[0], method=method, strength=[1.0, 0.5])


def test_ckplug_has_a_largest_strength() -> None:
    juice.Steer(target="parametric", method="ckplug", strength=1.0)
    with pytest.raises(RequestError, match="from 0 to 1 for method ckplug"):
        juice.Steer(target="parametric", method="ckplug", strength=1.01)


def test_every_contrast_is_its_formula_row_by_row() -> None:
    """Rows of all sharpness, several to an answer: grd decides at the first conflict alone."""
    rng = torch.Generator().manual_seed(0)
    seen: Counter[tuple[str, bool | None]] = Counter()
    for i in range(1500):
        method = [*CONTRASTS][i % len(CONTRASTS)]
        target = CONTRASTS[method][i % len(CONTRASTS[method])]
        strength = (0.25, 1.0)[i % 2] if method == "ckplug" else (0.5, 1.0, 2.5)[i % 3]
        mixer = Mixer(Contrast(prompt_ids=(1,), method=method, target=target, strength=strength))
        trusts = None
        for _ in range(3):
            c, m = torch.randn(2, 40, generator=rng) * (0.5, 2.0, 6.0)[i % 3]
            m = m * float(torch.rand((), generator=rng)) * 3 + c * (i % 4 == 0)
            c[7] = m[7] = -torch.inf if i % 5 == 0 else 0.0
            found = mixer.mixed(c, m).log_softmax(-1)
            row, trusts = oracle.contrasted(
                c.clamp(min=-1e4), m.clamp(min=-1e4), method, target, strength, trusts
            )
            expected = row.log_softmax(-1)
            if i % 5 == 0:
                assert found[7] == -torch.inf
            there = expected > -60
            torch.testing.assert_close(found[there], expected[there].float(), atol=2e-4, rtol=1e-4)
            assert bool((found[~there] < -50).all())
            seen[method, trusts] += 1
    assert min(seen["grd", True], seen["grd", False], seen["grd", None]) > 20


def test_contrasts_steer_a_conflict_toward_their_targets() -> None:
    model = juice.load("mini")
    prompt = "The name of the capital city of Kyrgyzstan is"
    context = f"{prompt} Bamako."

    def answer(method: str, target: str, **steer: float) -> str:
        steered = juice.Steer(target=target, method=method, **steer)
        return model.generate(prompt, context=context, steer=steered, max_tokens=8)[0].text

    assert model.generate(prompt, context=context, max_tokens=8)[0].text == " Bamako."
    for method in ("cad", "adacad", "cocoa", "ckplug"):
        assert answer(method, "context").startswith(" Bamako.")
    for method in ("ckplug", "grd"):
        assert answer(method, "parametric") == " Bishkek."
        assert answer(method, "parametric", strength=0.0) == " Bamako."


def test_a_form_holds_where_ckplug_leaves_its_tokens_out() -> None:
    model = juice.load("mini")
    form = Structure.choice(["Zurich", "Oslo"])
    steer = juice.Steer(target="parametric", method="ckplug")
    answer = model.generate(
        "The name of the capital city of Kyrgyzstan is",
        context="The name of the capital city of Kyrgyzstan is Bamako.",
        steer=steer,
        structure=form,
        max_tokens=12,
    )[0]
    assert answer.text in ("Zurich", "Oslo")


def test_an_adaptive_contrast_does_nothing_where_the_context_changes_nothing() -> None:
    """And is never stronger than the plain one of the same strength."""
    model = loaded("gpt2")
    options = {"max_tokens": 8, "ignore_eos": True, "context": "Rome is told of."}
    ada, cad = (
        model.request("It is", steer=juice.Steer(target="context", method=m), **options)
        for m in ("adacad", "cad")
    )
    assert (ada.contrast.method, cad.contrast.method) == ("adacad", "cad")
    same = replace(ada, contrast=replace(ada.contrast, prompt_ids=ada.prompt_ids))
    plain = model.request("It is", **options)
    found, expected = model.engine.generate([same, plain])
    assert found.token_ids == expected.token_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert model.engine.generate([ada])[0].steering.method == "adacad"
