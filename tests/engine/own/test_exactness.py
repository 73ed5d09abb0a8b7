"""One forward pass for both runs equals the two-run definition of an independent oracle."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

import juice
from juice.engine.load_options import Limits
from juice.engine.own.batch import Mode
from juice.engine.own.thread import BatchingEngine
from juice.engine.request import Request
from tests.support import oracle, tiny
from tests.support.mixed import TOLERANCE, mixed_requests, steering
from tests.support.running import assert_completes


@pytest.mark.parametrize(("max_batch", "max_prefill_tokens"), [(3, 60), (64, 2048), (5, 7)])
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_one_pass_equals_the_naive_two_runs(
    shape: str, max_batch: int, max_prefill_tokens: int
) -> None:
    """Kills: beta's sign flipped, source rows swapped, a head off by one, a bad mask or slot move,
    steering before a request's first position.

    With three at a time, requests join as others leave; with seven tokens a chunk, prompts take
    several. gemma2's sliding window of 8 is shorter than most sequences.
    """
    network = tiny.tiny_model(shape)
    requests, expected = [], []
    for i, (r, heads, method) in enumerate(mixed_requests(seed=1)):
        first = (0, len(r.prompt_ids) // 2, len(r.prompt_ids) - 1)[i % 3]
        requests.append(r.with_steering(replace(r.steering, first_position=first)))
        expected.append(
            oracle.generate(
                network, list(r.prompt_ids), heads, r.options.max_tokens, method=method, first=first
            )
        )
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    engine = BatchingEngine(
        model.loaded, Limits(max_batch=max_batch, max_prefill_tokens=max_prefill_tokens)
    )
    for completion, each in zip(engine.generate(requests), expected, strict=True):
        assert_completes(completion, each, TOLERANCE)


def test_the_oracle_itself_differs_between_methods_and_heads() -> None:
    """If steering changed nothing on these models, the test above could not fail."""
    network = tiny.tiny_model("gpt2")
    ids = list(range(1, 20))
    plain = oracle.steered_logits(network, ids, {})[-1]
    heads = {(1, 2): 2.0, (3, 0): -2.0}
    dual, once = (
        oracle.steered_logits(network, ids, heads, method=m)[-1] for m in ("juice", "june")
    )
    neighbour = oracle.steered_logits(network, ids, {(1, 3): 2.0, (3, 0): -2.0})[-1]
    assert (
        min((plain - dual).abs().max(), (once - dual).abs().max(), (neighbour - dual).abs().max())
        > 0.05
    )


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_zero_coefficients_take_the_unsteered_path_bit_for_bit(shape: str) -> None:
    model = juice.load(tiny.tiny_model(shape), tokenizer=tiny.tiny_tokenizer())
    head_set = model.make_head_set(
        name="test", target="context", plus=[(1, 2)], minus=[(2, 3)], beta_plus=2.0, beta_minus=-1.0
    )
    prompts = ["Paris is", "The capital of France is the city of", "a"]
    options = {"max_tokens": 8, "watch": tuple(range(tiny.VOCAB_SIZE))}
    plain = model.engine.generate([model.request(prompt, **options) for prompt in prompts])
    for zero in (
        {"strength": 0.0},
        {"steer": juice.Steer(target="context", beta_plus=0.0, beta_minus=0.0)},
    ):
        asked = {"steer": "context", "head_set": head_set, **zero, **options}
        steered = model.engine.generate([model.request(prompt, **asked) for prompt in prompts])
        assert not any(c.steering.applied for c in steered)
        for a, b in zip(plain, steered, strict=True):
            assert a.token_ids == b.token_ids
            assert a.watched == b.watched
            assert a.logprobs == b.logprobs


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_a_request_is_the_same_bit_for_bit_whoever_its_neighbours_are(shape: str) -> None:
    """The neighbours have other tokens, heads, betas and sampling; every forward has one shape."""
    model = juice.load(tiny.tiny_model(shape), tokenizer=tiny.tiny_tokenizer())
    everything = {"max_tokens": 12, "ignore_eos": True, "watch": tuple(range(tiny.VOCAB_SIZE))}
    mine = [
        Request.of(prompt_ids=tuple(range(1, 14)), **everything),
        Request.of(
            prompt_ids=tuple(range(20, 28)),
            steering=steering({(0, 1): 1.5, (2, 0): -2.0}),
            **everything,
        ),
    ]
    seen = []
    for seed in range(3):
        rng = Random(seed)
        neighbours = [
            Request.of(
                prompt_ids=tuple(rng.randrange(1, 283) for _ in range(length)),
                max_tokens=12,
                ignore_eos=True,
                steering=steering(
                    {
                        (0, rng.randrange(4)): rng.uniform(-3, 3),
                        (2, rng.randrange(4)): rng.uniform(-3, 3),
                    }
                ),
                temperature=rng.choice([0.0, 1.0]),
                seed=seed,
            )
            for length in (3, 13, 9)
        ]
        completions = model.engine.generate(
            [neighbours[0], mine[0], neighbours[1], mine[1], neighbours[2]]
        )
        seen.append(
            [(c.token_ids, c.logprobs, c.watched) for c in (completions[1], completions[3])]
        )
    assert seen[0] == seen[1] == seen[2]


def test_a_seed_gives_the_same_tokens_alone_and_in_company() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    request = Request.of(
        prompt_ids=(5, 6, 7),
        max_tokens=20,
        temperature=1.3,
        top_p=0.9,
        top_k=50,
        seed=11,
    )
    company = [r for r, _, _ in mixed_requests(seed=2)]
    alone = model.engine.generate([request])[0].token_ids
    assert model.engine.generate([*company[:5], request, *company[5:]])[5].token_ids == alone
    assert model.engine.generate([request.with_options(seed=12)])[0].token_ids != alone


def test_streamed_pieces_join_to_the_generated_text() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    for seed in range(5):
        options = {
            "max_tokens": 40,
            "temperature": 1.5,
            "seed": seed,
            "ignore_eos": True,
            "stop": ("e", "ab"),
        }
        text = model.generate("Bonjour, ça va", **options)[0].text
        assert "".join(model.stream("Bonjour, ça va", **options)) == text


def test_a_stop_token_counts_but_is_not_in_the_text() -> None:
    network = tiny.tiny_model("gpt2")
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    with torch.no_grad():
        # The end token's logit grows with anything.
        network.lm_head.weight[0] = network.lm_head.weight.abs().sum()
    completions = [
        c for c in model.generate(["ab", "xyz", "q"], max_tokens=9) if c.finish_reason == "stop"
    ]
    assert completions
    for completion in completions:
        assert completion.token_ids[-1] == 0
        assert len(completion.logprobs) == len(completion.token_ids)
        assert tiny.END not in completion.text


def test_a_request_runs_next_to_an_open_stream_and_a_closed_stream_leaves_nothing() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    text = model.generate("abc", max_tokens=9, ignore_eos=True)[0].text
    stream = model.engine.stream([model.request("xyz", max_tokens=100, ignore_eos=True)])
    next(stream)
    assert model.generate("abc", max_tokens=9, ignore_eos=True)[0].text == text
    stream.close()
    assert model.generate("abc", max_tokens=9, ignore_eos=True)[0].text == text
    assert model.engine.status.n_running == 0


def rows_by_layer(model: juice.SteeredModel, request: Request) -> list[int]:
    """Return how many rows enter each layer at the last decode step of a request."""
    seen: dict[int, int] = {}
    handles = [
        layer.attention.register_forward_pre_hook(
            lambda _m, args, kwargs, i=layer.index: seen.update(
                {i: (args[0] if args else kwargs["hidden_states"]).shape[0]}
            ),
            with_kwargs=True,
        )
        for layer in model.loaded.layout.layers
    ]
    model.engine.generate([request])
    for handle in handles:
        handle.remove()
    return [seen[i] for i in range(tiny.N_LAYERS)]


@pytest.mark.parametrize("shape", tiny.SHAPES)
@pytest.mark.parametrize(
    ("heads", "method", "rows"),
    [
        ({}, "juice", [1, 1, 1, 1]),
        ({(1, 0): 2.0, (1, 3): -1.0}, "juice", [1, 1, 1, 1]),
        ({(1, 0): 2.0, (2, 3): -1.0}, "juice", [1, 2, 2, 1]),
        ({(0, 0): 2.0, (3, 3): -1.0}, "juice", [2, 2, 2, 2]),
        ({(2, 0): 2.0, (3, 3): -1.0}, "juice", [1, 1, 2, 2]),
        ({(0, 0): 2.0, (3, 3): -1.0}, "june", [1, 1, 1, 1]),
        ({(0, 0): 2.0, (1, 1): 1.0, (3, 3): 0.0}, "juice", [2, 2, 1, 1]),
    ],
)
def test_the_clean_run_passes_only_through_the_layers_between_steered_ones(
    shape: str, heads: dict, method: str, rows: list[int]
) -> None:
    model = juice.load(tiny.tiny_model(shape), tokenizer=tiny.tiny_tokenizer())
    steered = steering({h: b for h, b in heads.items() if b}, method)
    request = Request.of(prompt_ids=(1, 2, 3), max_tokens=3, ignore_eos=True, steering=steered)
    assert rows_by_layer(model, request) == rows


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_layers_that_must_all_see_the_same_rows_get_two_full_ones(shape: str) -> None:
    """Every layer expects as many rows as the first, as with per-layer inputs or shared keys."""
    network = tiny.tiny_model(shape)
    expected = [
        oracle.generate(network, list(r.prompt_ids), heads, r.options.max_tokens, method=m)
        for r, heads, m in mixed_requests(seed=4)
    ]
    seen: list[int] = []

    def called(_module: object, args: tuple[torch.Tensor, ...]) -> None:
        seen[:] = [len(args[0])]

    def same_rows(_module: object, _args: object, output: object) -> None:
        if len(output[0] if isinstance(output, tuple) else output) != seen[0]:
            raise ValueError("not as many rows as at the start")

    network.get_input_embeddings().register_forward_pre_hook(called)
    for layer in network.transformer.h if shape == "gpt2" else network.model.layers:
        layer.register_forward_hook(same_rows)
    with pytest.warns(UserWarning, match="exact only with clean runs in full rows, which is"):
        model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    assert model.engine.mode == Mode(full_rows=True)
    engine = BatchingEngine(
        model.loaded, Limits(max_batch=4, max_prefill_tokens=15), Mode(full_rows=True)
    )
    completions = engine.generate([r for r, _, _ in mixed_requests(seed=4)])
    for completion, each in zip(completions, expected, strict=True):
        assert_completes(completion, each, TOLERANCE)
    request = Request.of(
        prompt_ids=(1, 2, 3),
        max_tokens=3,
        ignore_eos=True,
        steering=steering({(1, 0): 2.0, (2, 3): -1.0}),
    )
    assert rows_by_layer(model, request) == [2, 2, 2, 2]
    assert not juice.load(
        tiny.tiny_model(shape), tokenizer=tiny.tiny_tokenizer()
    ).engine.mode.full_rows
