"""Sampling against plain counts, and against the filters and penalties of transformers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import juice
from juice.engine.own.sampler import Draw, adjusted, choose, cuts_of, new_generator
from juice.engine.request import GenerationOptions, Request
from juice.engine.sampling_options import SamplingOptions
from juice.errors import RequestError
from tests.support import oracle, tiny

LOGITS = torch.tensor([2.0, -1.0, 3.0, 0.5, 2.5])


def draws(n: int, **options: object) -> list[Draw]:
    """Return n draws of one request."""
    sampling = SamplingOptions(seed=0, **options)
    generator = new_generator(sampling)
    assert generator is not None
    uniform = torch.rand(n, generator=generator, dtype=torch.float64).tolist()
    return [Draw(sampling=sampling, uniform=number) for number in uniform]


def kept_mass(logits: torch.Tensor, **options: float) -> torch.Tensor:
    """Return the probabilities that the options leave, int64 [vocabulary]."""
    sampling = SamplingOptions(**options)
    mass, tokens = cuts_of(sampling)(logits[None].float(), [sampling])
    if tokens is None:
        return mass[0]
    return torch.zeros(1, len(logits), dtype=torch.int64).scatter(1, tokens, mass)[0]


def drawn(n: int = 4000, **options: float) -> Counter[int]:
    return Counter(choose(LOGITS.expand(n, -1), draws(n, **options)).tolist())


def changed(sampling: SamplingOptions, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return LOGITS after bias and penalties."""
    draw = Draw(sampling=sampling, seen={*prompt, *answer}, token_ids=answer)
    return adjusted(LOGITS[None], [draw])[0]


# A value of each option that must change what comes out of LOGITS or how often.
NOTICED = {
    "temperature": 2.0,
    "top_p": 0.5,
    "top_k": 1,
    "min_p": 0.9,
    "repetition_penalty": 2.0,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "logit_bias": {0: 9.0},
    "seed": 1,
}


@pytest.mark.parametrize("name", SamplingOptions.model_fields)
def test_every_sampling_option_changes_what_is_drawn(name: str) -> None:
    """An option that is accepted everywhere and used nowhere would pass all other tests."""

    def tokens(**options: object) -> list[int]:
        sampling = SamplingOptions(**{"temperature": 1.0, "seed": 0, **options})
        generator, out = new_generator(sampling), list[int]()
        assert generator is not None
        for _ in range(200):
            uniform = float(torch.rand(1, generator=generator, dtype=torch.float64))
            draw = Draw(sampling=sampling, uniform=uniform, seen={2}, token_ids=out[-1:])
            out.append(int(choose(LOGITS[None], [draw])))
        return out

    assert tokens() == tokens()
    assert tokens(**{name: NOTICED[name]}) != tokens()


def test_temperature_zero_takes_the_likeliest() -> None:
    assert new_generator(SamplingOptions()) is None
    assert choose(LOGITS[None], [Draw(sampling=SamplingOptions())]).tolist() == [2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_probabilities(temperature: float) -> None:
    """With 4,000 draws the standard error is below 0.008, so 0.04 is five of them."""
    counts = drawn(temperature=temperature)
    expected = (LOGITS.double() / temperature).softmax(-1)
    for token, probability in enumerate(expected.tolist()):
        assert abs(counts[token] / 4000 - probability) < 0.04


def test_top_k_and_top_p_leave_only_the_likeliest() -> None:
    assert set(drawn(temperature=1.0, top_k=2)) == {2, 4}
    probabilities = LOGITS.softmax(-1)
    assert probabilities[2] < 0.6 < probabilities[2] + probabilities[4]
    assert set(drawn(temperature=1.0, top_p=0.6)) == {2, 4}
    assert set(drawn(temperature=1.0, top_p=1e-9)) == {2}
    assert set(drawn(temperature=1.0, min_p=1.0)) == {2}


@given(
    seed=st.integers(0, 10_000),
    n_tokens=st.sampled_from([5, 50, 3000]),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 7]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_the_filters_leave_the_distribution_that_transformers_leaves(
    seed: int,
    n_tokens: int,
    spread: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    logits = torch.randn(n_tokens, generator=torch.Generator().manual_seed(seed)) * spread
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].double())[0].softmax(-1)
    kept = kept_mass(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    ).double()
    torch.testing.assert_close(kept / kept.sum(), expected, rtol=0, atol=1e-9)


@given(
    counts=st.lists(st.integers(0, 4), min_size=2, max_size=9).filter(any),
    top_k=st.integers(0, 4),
    top_p=st.sampled_from([1.0, 0.75, 0.5, 0.3]),
    min_p=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_of_equal_tokens_the_first_are_kept_until_the_cuts_are_met(
    counts: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    """The oracle sorts and adds whole numbers; equal tokens are where a shortcut goes wrong."""

    def mass_of(**cuts: float) -> list[int]:
        return kept_mass(torch.tensor(counts).double().log(), temperature=1.0, **cuts).tolist()

    whole = mass_of()
    order = sorted(range(len(counts)), key=lambda i: (-whole[i], i))[: top_k or None]
    total, before, kept = sum(whole[i] for i in order), 0, set()
    for i in order:
        if before < top_p * total and whole[i] >= min_p * max(whole):
            kept.add(i)
        before += whole[i]
    expected = [mass if i in kept else 0 for i, mass in enumerate(whole)]
    assert mass_of(top_k=top_k, top_p=top_p, min_p=min_p) == expected


def test_rows_of_a_batch_draw_what_each_draws_alone() -> None:
    """Kills: a row's options, tokens or number given to another row."""
    rng = Random(0)
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(0)) * 2
    rows = [
        Draw(
            sampling=SamplingOptions(
                temperature=rng.choice([0.5, 1.0, 2.0]),
                top_k=rng.choice([0, 3, 50]),
                top_p=rng.choice([1.0, 0.9, 0.2]),
                min_p=rng.choice([0.0, 0.1]),
                repetition_penalty=rng.choice([1.0, 1.5]),
                presence_penalty=rng.choice([0.0, 1.0]),
                frequency_penalty=rng.choice([0.0, 0.5]),
                logit_bias=rng.choice([{}, {rng.randrange(500): 3.0}]),
            ),
            uniform=rng.choice([None, rng.random()]),
            seen={rng.randrange(500) for _ in range(20)},
            token_ids=[rng.randrange(500) for _ in range(20)],
            banned=rng.choice([frozenset[int](), frozenset({rng.randrange(500)})]),
        )
        for _ in range(40)
    ]
    alone = [int(choose(logits[i : i + 1], [row])) for i, row in enumerate(rows)]
    assert choose(logits, rows).tolist() == alone
    assert len(set(alone)) > 30


def drawable(logits: torch.Tensor, sampling: SamplingOptions) -> tuple[list[int], list[int]]:
    """Return the tokens that can be drawn, in order, and the mass up to each, in whole units.

    Logits are float32 [vocabulary]. Everything after the powers is sorted and added in Python.
    """
    powers = ((logits.double() - logits.double().max()) / sampling.temperature).exp()
    mass = [round(power * 2**40) for power in powers.tolist()]
    tokens, numbers = list(range(len(logits))), logits.tolist()
    if sampling.top_k or sampling.top_p < 1:
        tokens.sort(key=lambda token: -numbers[token])
        tokens = tokens[: sampling.top_k or None]
    if sampling.top_p < 1:
        sums = list(accumulate(mass[token] for token in tokens))
        before = [0, *sums[:-1]]
        whole = sums[-1] if sampling.top_k else sum(mass)
        tokens = [t for t, n in zip(tokens, before, strict=True) if n < sampling.top_p * whole]
    tokens = [token for token in tokens if mass[token] >= max(1, sampling.min_p * 2**40)]
    return tokens, list(accumulate(mass[token] for token in tokens))


@pytest.mark.parametrize("spread", [0.02, 0.3, 3.0, 12.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_draw_is_that_of_whole_numbers_sorted_and_added_one_by_one(
    dtype: torch.dtype, spread: float
) -> None:
    """Numbers at both sides of a border between tokens; in bfloat16 many tokens are equal.

    The smallest spread at temperature 2 is as flat as a usual one at 300; of the widest, many
    tokens have a unit or none. There are more tokens than a CPU has ranges for them, and more rows
    than it takes at once. Kills: a border that is off by one range, equal tokens in another order,
    a token without mass that has some.
    """
    rng, generator = Random(0), torch.Generator().manual_seed(0)
    rows, draws, expected = list[torch.Tensor](), list[Draw](), list[int]()
    for i in range(60):
        logits = (torch.randn(5000, generator=generator) * spread + 4).to(dtype).float()
        n_banned = (0, 0, 10, 4000, 4999)[i % 5]
        logits[torch.randperm(5000, generator=generator)[:n_banned]] = -torch.inf
        sampling = SamplingOptions(
            temperature=rng.choice([1e-3, 1.0, 1.5, 2.0]),
            top_p=rng.choice([0.1, 0.95, 0.98, 1.0]),
            top_k=rng.choice([0, 0, 0, 1, 50, 3000]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
        )
        tokens, sums = drawable(logits, sampling)
        borders = [sums[rng.randrange(len(sums))], sums[-2] if len(sums) > 1 else 0]
        at = [border / sums[-1] for border in borders]
        near = [math.nextafter(number, to) for number in at for to in (0.0, 1.0)]
        for uniform in (0.0, rng.random(), 1 - 2**-53, *at, *near):
            if uniform < 1:
                rows.append(logits)
                draws.append(Draw(sampling=sampling, uniform=uniform))
                expected.append(tokens[bisect_right(sums, int(uniform * sums[-1]))])
    assert choose(torch.stack(rows), draws).tolist() == expected
    assert len(set(expected)) > 60


def test_the_frequencies_of_a_cut_distribution_are_those_of_the_tokens_that_stay() -> None:
    counts = drawn(temperature=1.0, top_k=3, top_p=0.95)
    expected = LOGITS.double().softmax(-1) * torch.tensor([1, 0, 1, 0, 1])
    for token, probability in enumerate((expected / expected.sum()).tolist()):
        assert abs(counts[token] / 4000 - probability) < 0.04


@given(seed=st.integers(0, 10_000), penalty=st.sampled_from([0.5, 1.3, 4.0]))
def test_the_repetition_penalty_is_that_of_transformers(seed: int, penalty: float) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(20, generator=random)
    prompt, answer = (torch.randint(20, (n,), generator=random).tolist() for n in (6, 5))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + answer]), logits[None].clone()
    )[0]
    draw = Draw(
        sampling=SamplingOptions(repetition_penalty=penalty),
        seen={*prompt, *answer},
        token_ids=answer,
    )
    torch.testing.assert_close(adjusted(logits[None], [draw])[0], expected, rtol=0, atol=0)


class CountedPrompt(tuple[int, ...]):
    """A prompt that counts how often somebody goes through it."""

    n_times = 0

    def __iter__(self) -> Iterator[int]:
        type(self).n_times += 1
        return super().__iter__()


def test_the_repetition_penalty_goes_through_a_prompt_once() -> None:
    """Kills: a long prompt that is gone through at every token, in which all others wait."""
    network = tiny.tiny_model("llama")
    engine = juice.load(network, tokenizer=tiny.tiny_tokenizer()).engine
    ids = [7 * i % 280 + 1 for i in range(60)]
    n_times = list[int]()
    for n in (2, 20):
        CountedPrompt.n_times = 0
        options = GenerationOptions(max_tokens=n, ignore_eos=True, repetition_penalty=1.7)
        (done,) = engine.generate([Request(prompt_ids=CountedPrompt(ids), options=options)])
        n_times.append(CountedPrompt.n_times)
    assert n_times[0] == n_times[1] > 0
    so_far = list(ids)
    penalty = RepetitionPenaltyLogitsProcessor(1.7)
    for token in done.token_ids:
        logits = penalty(torch.tensor([so_far]), oracle.forward(network, so_far)[0][-1][None])
        assert token == int(logits.argmax())
        so_far.append(token)


def test_presence_and_frequency_count_only_the_answer() -> None:
    answer, prompt = [3, 3, 3, 1], [0, 0, 2]
    expected = LOGITS.clone()
    for token in range(5):
        if answer.count(token):
            expected[token] -= 0.5 + 0.25 * answer.count(token)
    got = changed(SamplingOptions(presence_penalty=0.5, frequency_penalty=0.25), prompt, answer)
    torch.testing.assert_close(got, expected)
    assert LOGITS[3] == 0.5, "the model's logits are not changed"


def test_a_bias_is_added_and_banned_tokens_cannot_be_drawn() -> None:
    draw = Draw(sampling=SamplingOptions(logit_bias={0: 5.0, 4: -1.0}), banned={2})
    got = adjusted(LOGITS[None], [draw])[0]
    assert got.tolist() == [7.0, -1.0, -torch.inf, 0.5, 1.5]


def test_min_tokens_holds_back_every_kind_of_stop() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    plain = model.generate("ab", max_tokens=20, logit_bias={0: 100.0})[0]
    assert (len(plain.token_ids), plain.finish_reason) == (1, "stop")
    ignored = model.generate("ab", max_tokens=4, logit_bias={0: 100.0}, ignore_eos=True)[0]
    assert (ignored.token_ids, ignored.finish_reason) == ((0, 0, 0, 0), "length")
    held = model.generate("ab", max_tokens=20, min_tokens=5, logit_bias={0: 100.0})[0]
    assert (len(held.token_ids), held.finish_reason) == (6, "stop")
    assert 0 not in held.token_ids[:5]
    free = model.generate("ab", max_tokens=20, ignore_eos=True)[0]
    early = free.text[:1]
    assert model.generate("ab", max_tokens=20, ignore_eos=True, stop=early)[0].text == ""
    late = model.generate("ab", max_tokens=20, ignore_eos=True, stop=early, min_tokens=3)[0]
    assert late.token_ids[:3] == free.token_ids[:3]
    assert len(late.token_ids) >= 3


def test_stop_token_ids_stop_even_where_the_models_own_are_ignored() -> None:
    model = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())
    free = model.engine.generate(
        [Request.of(prompt_ids=(1, 2, 3), max_tokens=20, ignore_eos=True)]
    )[0].token_ids
    stop = free[7]
    stopped = Request.of(
        prompt_ids=(1, 2, 3), max_tokens=20, ignore_eos=True, stop_token_ids=(stop,)
    )
    got = model.engine.generate([stopped])[0]
    assert got.token_ids == free[: free.index(stop) + 1]
    assert got.finish_reason == "stop"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("seed", 2**64),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -2.5),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", dict.fromkeys(range(2000), 1.0)),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingOptions.of(**{field: value})
    assert caught.value.param == field


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="temprature"):
        juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer()).generate(
            "x", temprature=1
        )
