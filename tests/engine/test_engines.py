"""What every engine promises, asked of each engine that is installed here.

The oracle is transformers' own model, uncached, in two runs.
"""

from __future__ import annotations

import time

import pytest
import torch
from transformers import PreTrainedModel

import juice
from juice.engine.answer import Completion
from juice.engine.contract import Capability, Engine
from juice.engine.request import Request
from juice.engine.sampling_options import SamplingOptions
from juice.engine.steer import Steer, resolve
from juice.errors import (
    CancelledError,
    ContextLengthError,
    MissingCapabilityError,
    RequestError,
)
from juice.formula import CONTRASTS, ContrastMethod, Target
from juice.head_set.head_set import HeadSet
from tests.support import head_sets, oracle, tiny
from tests.support.mixed import mixed_requests, steering
from tests.support.running import Collector, assert_completes

PROMPT = tuple(range(3, 20))
HEADS = {(1, 2): 2.0, (3, 0): -2.0}
TOLERANCE = 1e-4


def run(engine: Engine, **options: object) -> Completion:
    asked = {"prompt_ids": PROMPT, "max_tokens": 12, "ignore_eos": True, **options}
    return engine.generate([Request.of(**asked)])[0]


def sampled(engine: Engine, n: int = 12, **options: object) -> tuple[int, ...]:
    sampling = SamplingOptions(**{"temperature": 1.0, "seed": 1, **options})
    return run(engine, max_tokens=n, **dict(sampling)).token_ids


def greedy(network: PreTrainedModel, heads: dict | None = None, n: int = 12) -> list[int]:
    return oracle.generate(network, list(PROMPT), heads or {}, n)[0]


def test_mixed_requests_are_those_of_the_two_runs(engine: Engine, network: PreTrainedModel) -> None:
    mixed = mixed_requests(seed=3)
    for completion, (request, heads, method) in zip(
        engine.generate([request for request, _, _ in mixed]), mixed, strict=True
    ):
        expected = oracle.generate(
            network, list(request.prompt_ids), heads, request.options.max_tokens, method=method
        )
        assert_completes(completion, expected, TOLERANCE)


def test_a_strength_of_zero_is_unsteered_bit_for_bit(engine: Engine) -> None:
    head_set = HeadSet.parse(head_sets.content(), "test")
    none, zero, full = (
        run(engine, steering=resolve(Steer(target="context", strength=strength), each))
        if each
        else run(engine)
        for strength, each in ((0.0, None), (0.0, head_set), (1.0, head_set))
    )
    assert none.tokens == zero.tokens != full.tokens


def test_a_seed_gives_the_same_tokens_and_another_one_others(engine: Engine) -> None:
    assert sampled(engine) == sampled(engine)
    assert sampled(engine) != sampled(engine, seed=2)
    assert sampled(engine, seed=-1) == sampled(engine, seed=-1)


@pytest.mark.parametrize("n", [20, pytest.param(200, marks=pytest.mark.long)])
def test_a_seed_gives_the_same_tokens_beside_requests_without_one(engine: Engine, n: int) -> None:
    """Their prompts are prefilled in chunks that depend on who else runs."""
    drawn = {"max_tokens": 8, "ignore_eos": True, "temperature": 1.3, "top_p": 0.9}
    seeded = Request.of(prompt_ids=PROMPT * 2, seed=11, **drawn)
    others = [Request.of(prompt_ids=PROMPT[: 1 + i % 17], **drawn) for i in range(2 * n)]
    alone = engine.generate([seeded])[0].token_ids
    mixed = [one for i in range(n) for one in (*others[2 * i : 2 * i + 2], seeded)]
    done = engine.generate(mixed)
    assert {each.token_ids for each in done[2::3]} == {alone}
    # Three of the others have the first prompt: two of these alike are one in 10^10.
    assert len({each.token_ids for each in done if each.n_prompt_tokens == 1}) > 1


def test_tokens_that_the_tokenizer_does_not_know_are_tokens_as_others_are(
    engine: Engine, network: PreTrainedModel
) -> None:
    """Kills: a bound by the tokenizer, where an output layer is padded to a round number."""
    first, last = len(tiny.tiny_tokenizer()), tiny.VOCAB_SIZE - 1
    assert first < last
    ids = [*PROMPT, first, last]
    scores = oracle.steered_logits(network, ids, {}).log_softmax(-1)
    done = run(
        engine, prompt_ids=tuple(ids), prompt_logprobs=True, watch=(first, last), max_tokens=3,
        logit_bias={last: 100.0}, top_logprobs=2,
    )  # fmt: skip
    assert done.prompt_tokens[-1].logprob == pytest.approx(float(scores[-2, last]), abs=TOLERANCE)
    expected = [float(scores[-1, first]), float(scores[-1, last])]
    assert list(done.watched) == pytest.approx(expected, abs=TOLERANCE)
    assert (done.token_ids, done.text) == ((last,) * 3, "")
    stopped = run(engine, stop_token_ids=(last,), logit_bias={last: 100.0})
    assert (stopped.token_ids, stopped.finish_reason) == ((last,), "stop")


def test_the_cuts_leave_the_likeliest(engine: Engine, network: PreTrainedModel) -> None:
    for cut in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert list(sampled(engine, **cut)) == greedy(network), cut


def test_a_bias_forces_and_forbids_a_token(engine: Engine, network: PreTrainedModel) -> None:
    first = greedy(network, n=1)[0]
    forced, forbidden = (
        run(engine, max_tokens=3, logit_bias=bias).token_ids
        for bias in ({7: 100.0}, {first: -100.0})
    )
    assert forced == (7, 7, 7)
    assert first not in forbidden


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 3.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}],
    ids=lambda penalty: next(iter(penalty)),
)
def test_penalties_are_those_of_the_formulas(
    engine: Engine, network: PreTrainedModel, penalty: dict[str, float]
) -> None:
    options, tokens = SamplingOptions(**penalty), list[int]()
    for _ in range(12):
        logits = oracle.steered_logits(network, [*PROMPT, *tokens], {})[-1]
        for token in {*PROMPT, *tokens}:
            scale = options.repetition_penalty
            logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
        for token in set(tokens):
            logits[token] -= options.presence_penalty
            logits[token] -= options.frequency_penalty * tokens.count(token)
        tokens.append(int(logits.argmax()))
    assert list(run(engine, **dict(options)).token_ids) == tokens


def test_it_stops_at_a_string_a_token_or_the_length(
    model: juice.SteeredModel, network: PreTrainedModel
) -> None:
    engine, expected = model.engine, greedy(network)
    whole = run(engine)
    assert (list(whole.token_ids), whole.finish_reason) == (expected, "length")
    at_token = run(engine, stop_token_ids=(expected[4],))
    end = expected.index(expected[4])
    assert (list(at_token.token_ids), at_token.finish_reason) == (expected[: end + 1], "stop")
    late = run(engine, stop_token_ids=(expected[4],), min_tokens=8)
    assert len(late.token_ids) >= 8
    word = whole.text[5:8]
    at_string = run(engine, stop=(word,))
    assert at_string.text == whole.text.partition(word)[0]
    assert at_string.finish_reason == "stop"


def test_the_models_own_end_stops_it_unless_ignored(
    engine: Engine, network: PreTrainedModel
) -> None:
    ends = {"logit_bias": {0: 100.0}, "max_tokens": 4}
    assert run(engine, **ends, ignore_eos=False).token_ids == (0,)
    assert run(engine, **ends).token_ids == (0, 0, 0, 0)


def test_log_probabilities_are_those_of_the_steered_run(
    engine: Engine, network: PreTrainedModel
) -> None:
    """They do not depend on temperature, penalties or cuts."""
    sampling = SamplingOptions(temperature=1.7, seed=4, top_k=20, presence_penalty=1.0)
    done = run(engine, steering=steering(HEADS), **dict(sampling), top_logprobs=5)
    for i, token in enumerate(done.tokens):
        logits = oracle.steered_logits(network, [*PROMPT, *done.token_ids[:i]], HEADS)[-1]
        scores = logits.log_softmax(-1)
        best = scores.topk(5)
        assert token.logprob == pytest.approx(float(scores[token.id]), abs=TOLERANCE)
        assert [one for one, _ in token.top] == best.indices.tolist()
        assert [score for _, score in token.top] == pytest.approx(
            best.values.tolist(), abs=TOLERANCE
        )


def test_the_prompts_log_probabilities_too_with_new_tokens_or_none(
    engine: Engine, network: PreTrainedModel
) -> None:
    logits = oracle.steered_logits(network, list(PROMPT), HEADS).log_softmax(-1)
    expected = logits[torch.arange(len(PROMPT) - 1), list(PROMPT[1:])].tolist()
    for n in (3, 0):
        done = run(
            engine, steering=steering(HEADS), prompt_logprobs=True, max_tokens=n, top_logprobs=2
        )
        assert len(done.tokens) == n
        assert [token.id for token in done.prompt_tokens] == list(PROMPT)
        assert done.prompt_tokens[0].logprob is None
        assert [t.logprob for t in done.prompt_tokens[1:]] == pytest.approx(expected, abs=TOLERANCE)
        assert all(len(token.top) == 2 for token in done.prompt_tokens[1:])


def test_watched_tokens_are_scored_at_the_first_new_position(
    engine: Engine, network: PreTrainedModel
) -> None:
    scores = oracle.steered_logits(network, list(PROMPT), HEADS)[-1].log_softmax(-1)
    done = run(engine, steering=steering(HEADS), watch=(5, 3, 5))
    assert list(done.watched) == pytest.approx([float(scores[i]) for i in (5, 3, 5)], abs=TOLERANCE)


def test_more_watched_tokens_than_vllm_scores_at_once_have_their_scores(
    engine: Engine, network: PreTrainedModel
) -> None:
    """Kills: counting the sampled token, whose score comes along, as one that is watched."""
    scores = oracle.steered_logits(network, list(PROMPT), {})[-1].log_softmax(-1)
    every = [token for token in range(len(scores)) if token != int(scores.argmax())][:129]
    done = run(engine, watch=tuple(every))
    assert list(done.watched) == pytest.approx([float(scores[i]) for i in every], abs=TOLERANCE)


def test_a_prompt_is_scored_up_to_what_the_engine_says_and_a_longer_one_is_refused(
    engine: Engine,
) -> None:
    """vLLM samples a token even where none is asked for."""
    n = engine.max_scored_tokens
    assert n == engine.limits.max_model_len - (engine.name == "vllm")
    whole = {"prompt_ids": (5,) * n, "max_tokens": 0, "prompt_logprobs": True}
    assert len(run(engine, **whole).prompt_tokens) == n
    longer = {**whole, "prompt_ids": (5,) * (n + 1)}
    with pytest.raises(ContextLengthError, match=f"prompt has {n + 1} tokens.* shorten the prompt"):
        run(engine, **longer)


def test_requests_that_watch_and_others_each_get_their_scores(engine: Engine) -> None:
    """They share steps: the others run while one after another begins to watch."""
    every = tuple(range(0, tiny.VOCAB_SIZE, 40))
    long = [
        Request.of(prompt_ids=PROMPT, max_tokens=40, ignore_eos=True, top_logprobs=n, **sampling)
        for n in (0, 1, 3, 20)
        for sampling in ({}, {"temperature": 1.0, "seed": 1})
    ]
    alone = [engine.generate([one])[0] for one in long]
    watching = Request.of(prompt_ids=PROMPT, max_tokens=1, watch=every)
    watched = engine.generate([watching])[0].watched
    collector, second = Collector(), Collector()
    engine.submit(long, collector)
    for _ in range(6):
        engine.submit([watching], second)
        time.sleep(0.01)
    collector.wait(len(long))
    second.wait(6)
    for i, expected in enumerate(alone):
        done = collector.completion(i)
        assert done.token_ids == expected.token_ids
        for token, other in zip(done.tokens, expected.tokens, strict=True):
            assert [best for best, _ in token.top] == [best for best, _ in other.top]
    assert all(
        one.completion.watched == pytest.approx(watched, abs=TOLERANCE)
        for one in second.updates[0]
        if one.completion
    )


def test_streamed_pieces_join_to_the_text(model: juice.SteeredModel) -> None:
    options = {"max_tokens": 30, "ignore_eos": True}
    pieces = list(model.stream("Paris is", **options))
    assert len(pieces) > 3
    assert "".join(pieces) == model.generate("Paris is", **options)[0].text


def test_a_completion_counts_and_times_its_tokens(engine: Engine) -> None:
    done = run(engine, max_tokens=5)
    assert (done.n_prompt_tokens, len(done.tokens)) == (len(PROMPT), 5)
    assert len(done.timing.tokens_s) == 5
    assert 0 <= done.timing.queued_s <= done.timing.tokens_s[0] <= done.timing.tokens_s[-1]


def test_what_is_cancelled_ends_and_the_others_go_on(
    engine: Engine, network: PreTrainedModel
) -> None:
    long = Request.of(prompt_ids=PROMPT, max_tokens=100, ignore_eos=True)
    cancelled, other = Collector(), Collector()
    (running,) = engine.submit([long], cancelled)
    engine.submit([long.with_options(max_tokens=12)], other)
    while not cancelled.updates:
        time.sleep(0.001)
    running.cancel()
    cancelled.wait(1)
    other.wait(1)
    assert isinstance(cancelled.error(), CancelledError)
    assert list(other.completion().token_ids) == greedy(network)
    assert engine.status.n_running == engine.status.n_waiting == 0


def test_what_cannot_run_is_refused_before_it_waits(engine: Engine) -> None:
    refused = {
        ContextLengthError: {"prompt_ids": (1,) * 120, "max_tokens": 9},
        RequestError: {"prompt_ids": (tiny.VOCAB_SIZE,)},
    }
    for error, options in refused.items():
        with pytest.raises(error):
            run(engine, **options)


@pytest.mark.parametrize(("method", "targets"), CONTRASTS.items())
def test_what_an_engine_cannot_do_is_refused_by_name(
    model: juice.SteeredModel, method: ContrastMethod, targets: tuple[Target, ...]
) -> None:
    steer = juice.Steer(target=targets[0], method=method)
    if Capability.CONTRAST in model.engine.capabilities:
        (done,) = model.generate("a", context="b", steer=steer, max_tokens=1)
        assert done.steering.method == method
    else:
        with pytest.raises(MissingCapabilityError, match=method):
            model.generate("a", context="b", steer=steer)


def test_requests_far_beyond_the_batch_all_complete(
    engine: Engine, network: PreTrainedModel
) -> None:
    expected = greedy(network, n=4)
    request = Request.of(prompt_ids=PROMPT, max_tokens=4, ignore_eos=True)
    assert [list(c.token_ids) for c in engine.generate([request] * 30)] == [expected] * 30


def test_a_status_says_what_runs_and_in_how_much_memory(engine: Engine) -> None:
    status = engine.status
    assert status.is_alive
    assert 0 <= status.n_kv_bytes <= status.max_kv_bytes
    assert status.max_kv_bytes > 0
    assert engine.n_kv_bytes_per_token >= 4 * 2 * 2 * 32 * 4  # layers, k and v, heads, width, bytes
