"""Context-aware decoding as two coupled rows of a batch equals two uncached forwards per token."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

import juice
from juice.engine.load_options import Limits
from juice.engine.own.thread import BatchingEngine
from juice.engine.request import Contrast, Request
from juice.errors import NonFiniteError, RequestError
from tests.support import oracle, tiny
from tests.support.mixed import TOLERANCE, mixed_requests
from tests.support.running import Collector, assert_completes, loaded

CAD = juice.Steer(target="context", method="cad")


def contrasts(n: int = 8) -> list[Request]:
    rng, made = Random(3), []
    for _ in range(n):
        ids, without = (
            tuple(rng.randrange(1, tiny.VOCAB_SIZE) for _ in range(rng.choice([1, 3, 11, 28])))
            for _ in range(2)
        )
        contrast = Contrast(
            prompt_ids=without,
            weight=rng.choice([0.5, 1.0, 3.0]),
            is_adaptive=rng.random() < 0.5,
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
    """Kills: the two logits swapped, the weight off by one, a row that misses a token; for an
    adaptive contrast another divergence, or that of another token.

    The two prompts of a contrast may end in different chunks.
    """
    network = tiny.tiny_model(shape)
    expected = [
        oracle.generate_contrasted(
            network,
            list(r.prompt_ids),
            list(r.contrast.prompt_ids),
            r.contrast.weight,
            r.options.max_tokens,
            is_adaptive=r.contrast.is_adaptive,
        )
        for r in contrasts()
    ]
    assert {r.contrast.is_adaptive for r in contrasts()} == {True, False}
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
        == oracle.generate_contrasted(model.loaded.model, ids, without, 4.0, 6)[0]
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


@pytest.mark.parametrize("method", ["cad", "adacad"])
def test_a_contrast_has_one_target_and_no_heads(method: str) -> None:
    with pytest.raises(RequestError, match="context only"):
        juice.Steer(target="parametric", method=method)
    with pytest.raises(RequestError, match="steer is none"):
        juice.Steer(target="none", method=method)
    with pytest.raises(RequestError, match="beta_plus is given"):
        juice.Steer(target="context", method=method, beta_plus=1.0)


def test_an_adaptive_contrast_does_nothing_where_the_context_changes_nothing() -> None:
    """And is never stronger than the plain one of the same strength."""
    model = loaded("gpt2")
    options = {"max_tokens": 8, "ignore_eos": True, "context": "Rome is told of."}
    ada, cad = (
        model.request("It is", steer=juice.Steer(target="context", method=m), **options)
        for m in ("adacad", "cad")
    )
    assert ada.contrast.is_adaptive
    assert not cad.contrast.is_adaptive
    same = replace(ada, contrast=replace(ada.contrast, prompt_ids=ada.prompt_ids))
    plain = model.request("It is", **options)
    found, expected = model.engine.generate([same, plain])
    assert found.token_ids == expected.token_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert model.engine.generate([ada])[0].steering.method == "adacad"
