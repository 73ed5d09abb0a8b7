"""Rows that may not share a forward: models that build their masks, or whose positions change."""

from __future__ import annotations

import logging

import pytest
import torch

import juice
from juice.engine.load_options import Limits
from juice.engine.own.thread import BatchingEngine
from juice.engine.request import Contrast, Request
from juice.errors import GenerationError
from juice.model.masks import attention_pattern
from tests.support import oracle, tiny
from tests.support.architectures import SWITCH, build
from tests.support.mixed import TOLERANCE, steering
from tests.support.running import Collector, assert_completes, rows_of

HEADS = {(0, 1): 2.0, (2, 3): -1.0}


def shapes_of(engine: BatchingEngine) -> list[tuple[int, int]]:
    """Return the list to which every forward adds its numbers of rows and tokens."""
    seen: list[tuple[int, int]] = []
    forward = engine.loop.runner.forward
    engine.loop.runner.forward = lambda batch: (
        seen.append(tuple(batch.input_ids.shape)),
        forward(batch),
    )[1]  # type: ignore[method-assign]
    return seen


def contrasted(prompt: tuple[int, ...], without: tuple[int, ...], n: int) -> Request:
    return Request.of(
        prompt_ids=prompt,
        contrast=Contrast(prompt_ids=without),
        max_tokens=n,
        ignore_eos=True,
    )


def test_rows_that_cross_a_switch_together_are_prefilled_again_alone_and_one_a_step() -> None:
    """One forward of them all, padded to a prompt's length, would take the memory of many prompts.

    The two rows of a contrast cross at different steps, and wait for each other.
    """
    network = build("Phi-3 (longrope)")
    prompts = [tuple(range(i, i + SWITCH - 3)) for i in range(1, 7)]
    requests = [
        Request.of(prompt_ids=p, max_tokens=8, ignore_eos=True, steering=steering(HEADS))
        for p in prompts
    ]
    pairs = [
        contrasted(tuple(range(i, i + SWITCH - 3)), tuple(range(i, i + SWITCH - 5)), 9)
        for i in (40, 60)
    ]
    expected = [oracle.generate(network, list(p), HEADS, 8) for p in prompts]
    expected += [
        oracle.generate_contrasted(network, list(p.prompt_ids), list(p.contrast.prompt_ids), 9)
        for p in pairs
    ]
    engine = BatchingEngine(
        juice.load(network, tokenizer=tiny.tiny_tokenizer()).loaded, Limits(max_prefill_tokens=16)
    )
    shapes = shapes_of(engine)
    for completion, each in zip(engine.generate([*requests, *pairs]), expected, strict=True):
        assert_completes(completion, each, TOLERANCE, is_watched=False)
    again = [rows for rows, n_tokens in shapes if n_tokens == SWITCH + 1]
    assert again == [1] * 10


def test_rows_that_cross_a_switch_go_on_where_memory_lacks_for_all_their_tokens() -> None:
    """Kills: a row that starts anew whenever what was computed again reaches the switch."""
    network = build("Phi-3 (longrope)")
    prompts = [list(range(i, i + SWITCH - 3)) for i in range(1, 4)]
    expected = [oracle.generate(network, prompt, HEADS, 8) for prompt in prompts]
    engine = juice.load(network, tokenizer=tiny.tiny_tokenizer()).engine
    lengths = list[int]()

    def lacks(_module: object, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].shape[1] > 6:
            raise torch.OutOfMemoryError("no memory is left")
        lengths.append(args[0].shape[1])
        assert len(lengths) < 100, "the rows never end"

    network.get_input_embeddings().register_forward_pre_hook(lacks)
    requests = [
        Request.of(prompt_ids=tuple(p), max_tokens=8, ignore_eos=True, steering=steering(HEADS))
        for p in prompts
    ]
    for completion, each in zip(engine.generate(requests), expected, strict=True):
        assert_completes(completion, each, TOLERANCE, is_watched=False)


def test_prompts_of_any_length_are_prefilled_together_by_a_model_that_builds_its_masks() -> None:
    engine = juice.load(build("BLOOM"), tokenizer=tiny.tiny_tokenizer()).engine
    shapes = shapes_of(engine)
    engine.generate(
        [
            Request.of(prompt_ids=tuple(range(1, n)), max_tokens=2, ignore_eos=True)
            for n in (4, 6, 6, 9)
        ]
    )
    assert shapes[0] == (4, 8)
    assert sorted(shapes[1:]) == [(1, 1), (1, 1), (2, 1)]


def test_a_contrast_whose_first_row_fails_ends_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its rows have different numbers of tokens cached, so a step runs them in two forwards.

    The second must not run a row that has left.
    """
    network = build("GPT-Neo")
    pair, other = (
        contrasted((5, 6, 12), (7, 8, 9, 10, 11), 5),
        Request.of(prompt_ids=(1, 2, 3), max_tokens=6, ignore_eos=True),
    )
    broken = oracle.generate_contrasted(network, [5, 6, 12], [7, 8, 9, 10, 11], 1)[0][0]
    expected = oracle.generate(network, [1, 2, 3], {}, 6)[0]
    assert broken not in expected
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())

    def raise_for(_module: object, args: tuple[torch.Tensor, ...]) -> None:
        if (args[0] == broken).any():
            raise ValueError("this token is broken")

    network.get_input_embeddings().register_forward_pre_hook(raise_for)
    collector = Collector()
    with caplog.at_level(logging.CRITICAL, logger="juice.engine.own"):
        model.engine.submit([pair, other], collector)
        collector.wait(2)
    assert isinstance(collector.error(0), GenerationError)
    assert list(collector.completion(1).token_ids) == expected
    assert model.engine.status.is_alive
    assert not rows_of(model.engine)


def test_biases_that_all_rows_share_are_not_taken_for_one_per_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """MPT passes its layers biases [n_heads, 1, keys]; here there are as many rows as heads."""
    engine = juice.load(build("MPT"), tokenizer=tiny.tiny_tokenizer()).engine
    caplog.clear()
    requests = [
        Request.of(prompt_ids=(i, 2, 3), max_tokens=3, ignore_eos=True, steering=steering(HEADS))
        for i in range(tiny.N_HEADS)
    ]
    assert len(engine.generate(requests)) == tiny.N_HEADS
    assert not caplog.records, "the batch failed, and its rows were run alone"


@pytest.mark.parametrize("kind", ["flex_attention", "flash_attention_2", "paged|eager"])
def test_attention_that_cannot_take_the_engines_masks_keeps_its_own(kind: str) -> None:
    network = tiny.tiny_model("llama")
    assert attention_pattern(network) is not None
    network.config._attn_implementation_internal = kind
    assert attention_pattern(network) is None
