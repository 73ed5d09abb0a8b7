"""Sampling against plain counts, and against the filters and penalties of transformers."""

from __future__ import annotations

from collections import Counter

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
from juice.batching.sampling import N_CANDIDATES, _candidates, adjusted, choose, new_generator
from juice.engine import GenerationRequest
from juice.errors import RequestError
from juice.options import SamplingOptions
from tests.support import tiny

LOGITS = torch.tensor([2.0, -1.0, 3.0, 0.5, 2.5])


def drawn(n: int = 4000, **options: float) -> Counter[int]:
    sampling = SamplingOptions(seed=0, **options)
    generator = new_generator(sampling)
    return Counter(choose(LOGITS, sampling, generator) for _ in range(n))


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
        for _ in range(200):
            logits = adjusted(LOGITS, sampling, [2], out[-1:])
            out.append(choose(logits, sampling, generator))
        return out

    assert tokens() == tokens()
    assert tokens(**{name: NOTICED[name]}) != tokens()


def test_temperature_zero_takes_the_likeliest() -> None:
    assert choose(LOGITS, SamplingOptions(), new_generator(SamplingOptions())) == 2


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
    n_tokens=st.sampled_from([5, 50, 3 * N_CANDIDATES]),
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
    """Some vocabularies exceed the candidates kept: the shortcut past sorting must not show."""
    logits = torch.randn(n_tokens, generator=torch.Generator().manual_seed(seed)).double() * spread
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].softmax(-1)
    sampling = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept, tokens = _candidates((logits / temperature).softmax(-1), sampling)
    got = torch.zeros_like(logits)
    got[tokens] = kept / kept.sum()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


@given(seed=st.integers(0, 10_000), penalty=st.sampled_from([0.5, 1.3, 4.0]))
def test_the_repetition_penalty_is_that_of_transformers(seed: int, penalty: float) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(20, generator=random)
    prompt, answer = (torch.randint(20, (n,), generator=random).tolist() for n in (6, 5))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + answer]), logits[None].clone()
    )[0]
    torch.testing.assert_close(
        adjusted(logits, SamplingOptions(repetition_penalty=penalty), prompt, answer),
        expected,
        rtol=0,
        atol=0,
    )


def test_presence_and_frequency_count_only_the_answer() -> None:
    answer, prompt = [3, 3, 3, 1], [0, 0, 2]
    expected = LOGITS.clone()
    for token in range(5):
        if answer.count(token):
            expected[token] -= 0.5 + 0.25 * answer.count(token)
    got = adjusted(
        LOGITS, SamplingOptions(presence_penalty=0.5, frequency_penalty=0.25), prompt, answer
    )
    torch.testing.assert_close(got, expected)
    assert LOGITS[3] == 0.5, "the model's logits are not changed"


def test_a_bias_is_added_and_banned_tokens_cannot_be_drawn() -> None:
    got = adjusted(LOGITS, SamplingOptions(logit_bias={0: 5.0, 4: -1.0}), [], [], banned={2})
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
        [GenerationRequest(prompt_ids=(1, 2, 3), max_tokens=20, ignore_eos=True)]
    )[0].token_ids
    stop = free[7]
    stopped = GenerationRequest(
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
