"""What coefficients are learned from: values against the oracle, slopes against differences."""

from __future__ import annotations

from itertools import islice
from random import Random
from statistics import mean
from typing import Any

import pytest
import torch

import juice
from juice.data.memory import open_prompts
from juice.formula import CONFLICTS
from juice.identification import attribution, lessons, ordinary
from juice.identification.lessons import Batch, Lessons, Step
from juice.identification.options import IdentificationOptions
from juice.identification.task import Task
from tests.support import oracle, tiny
from tests.support.conflicts import examples

PROMPTS = [(5, 9, 2, 7, 1, 30), (3, 3, 8), (11, 4, 6, 2, 90, 14, 7, 21, 5, 60, 8)]
ANSWERS = [17, 40, 3]
WEIGHT, STEP = 3.0, 1e-3
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def table_of(model: juice.SteeredModel, seed: int) -> torch.Tensor:
    layout = model.loaded.layout
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layout.n_layers, layout.n_heads, generator=generator) / 4


def lessons_of(model: juice.SteeredModel, method: str = "juice", **options: object) -> Lessons:
    how = IdentificationOptions(**options)
    task = Task(model=model, target="parametric", examples=examples(), options=how)
    return Lessons(task, examples(), method)


def lost_lead(unsteered: torch.Tensor, steered: torch.Tensor) -> float:
    """Return by how much less the likeliest token leads; more than 2 nats are not needed."""
    top = int(unsteered.argmax())

    def lead(logits: torch.Tensor) -> float:
        return float(logits[top]) - max(float(x) for i, x in enumerate(logits) if i != top)

    return max(0.0, min(lead(unsteered), 2.0) - lead(steered))


def value_of(batch: Batch, table: torch.Tensor) -> float:
    with batch.value(table) as value:
        return float(value)


@pytest.mark.parametrize("method", ["juice", "june"])
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_what_is_minimised_is_what_the_two_runs_give(shape: str, method: str) -> None:
    """Kills: padding that counts, another answer's token, KL the other way round, one z."""
    model = juice.load(tiny.tiny_model(shape), tokenizer=tiny.tiny_tokenizer())
    plain, table = tiny.tiny_model(shape), table_of(model, 1)
    heads = {
        (at // tiny.N_HEADS, at % tiny.N_HEADS): float(b) for at, b in enumerate(table.view(-1))
    }
    steered = [oracle.steered_logits(plain, list(p), heads, method=method) for p in PROMPTS]
    clean = [oracle.forward(plain, list(p))[0] for p in PROMPTS]
    surprises = [
        -float(logits[-1].log_softmax(-1)[answer])
        for logits, answer in zip(steered, ANSWERS, strict=True)
    ]
    nats = [
        oracle.relative_entropy(one, other)
        for pair in zip(clean, steered, strict=True)
        for one, other in zip(*pair, strict=True)
    ]
    ends = [
        oracle.relative_entropy(one[-1], other[-1])
        for one, other in zip(clean, steered, strict=True)
    ]
    lost = [2 * lost_lead(one[-1], other[-1]) for one, other in zip(clean, steered, strict=True)]
    answered = Batch(model.loaded, PROMPTS, ANSWERS, method)
    left_alone = Batch(model.loaded, PROMPTS, None, method)
    without_context = Batch(model.loaded, PROMPTS, None, method, lead=True)
    text = Batch(model.loaded, PROMPTS, None, method, read_at=[range(len(p)) for p in PROMPTS])
    some = [sorted({0, len(prompt) // 2}, reverse=True) for prompt in PROMPTS]
    of_some = [
        oracle.relative_entropy(one[at], other[at])
        for one, other, places in zip(clean, steered, some, strict=True)
        for at in places
    ]
    in_part = Batch(model.loaded, PROMPTS, None, method, read_at=some)
    with torch.no_grad():
        for _ in range(2):  # a clean run is kept
            assert value_of(answered, table) == pytest.approx(mean(surprises), abs=1e-5)
            assert value_of(left_alone, table) == pytest.approx(mean(ends), abs=1e-5)
            both = mean(ends) + mean(lost)
            assert value_of(without_context, table) == pytest.approx(both, abs=1e-5)
            assert value_of(text, table) == pytest.approx(mean(nats), abs=1e-5)
            assert value_of(in_part, table) == pytest.approx(mean(of_some), abs=1e-5)
    assert min(mean(nats), mean(ends), mean(lost)) > 0.01


def differences(made: Lessons, step: Step, at: torch.Tensor) -> torch.Tensor:
    """Return central differences of the weighted sum of a step's values."""

    def total(table: torch.Tensor) -> float:
        with torch.no_grad():
            answered = sum(share * value_of(batch, table) for batch, share in step.asked)
            beside = [value_of(b, table) for b in (step.left_open, step.replies) if b is not None]
            unmoved = value_of(step.text, table) + lessons.SHARE_BESIDE * sum(beside)
            return answered + WEIGHT * unmoved

    found = torch.zeros_like(at)
    for layer, head in torch.ones_like(at).nonzero().tolist():
        up, down = at.clone(), at.clone()
        up[layer, head] += STEP
        down[layer, head] -= STEP
        found[layer, head] = (total(up) - total(down)) / (2 * STEP)
    return found


@pytest.mark.parametrize(
    ("shape", "method"),
    [
        pytest.param(shape, method, marks=() if (i + j) % 2 else pytest.mark.long)
        for i, shape in enumerate(tiny.SHAPES)
        for j, method in enumerate(("juice", "june"))
    ],
)
def test_slopes_are_the_differences_of_what_is_minimised(shape: str, method: str) -> None:
    """Kills: a weight or share left out, a batch twice, derivatives through the clean run."""
    network = tiny.tiny_model(shape).double()
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    made = lessons_of(model, method, protect=("unknown", "true", "irrelevant"))
    step = next(made.steps(Random(0)))
    for at in (torch.zeros(tiny.N_LAYERS, tiny.N_HEADS), table_of(model, 2)):
        found, expected = made.slope(step, at, WEIGHT), differences(made, step, at)
        assert expected.abs().max() > 0.05
        assert (found - expected).abs().max() <= 0.01 * expected.abs().max()
    # Leads have no slope at zero, and bend within a step here and there.
    made = lessons_of(model, method, protect=("clean",))
    step = next(made.steps(Random(0)))
    found, expected = made.slope(step, at, WEIGHT), differences(made, step, at)
    off = (found - expected).abs() / expected.abs().max()
    assert off.quantile(0.8) <= 0.01
    assert off.max() <= 0.1


@pytest.mark.parametrize("method", ["juice", "june"])
def test_layers_that_are_computed_again_and_runs_that_are_not_kept_change_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: layers of a large model that are computed again without the steering.

    So it is with the fused attention that longer prompts have.
    """
    model = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())
    first, then = table_of(model, 1), table_of(model, 2)

    def slopes() -> list[torch.Tensor]:
        made = lessons_of(model, method)
        step = next(made.steps(Random(0)))
        return [made.slope(step, at, WEIGHT) for at in (first, then)]

    whole = slopes()
    monkeypatch.setattr(attribution, "N_SHORT", 0)
    torch.testing.assert_close(slopes(), whole, atol=1e-5, rtol=1e-4)
    monkeypatch.setattr(lessons, "MOST_KEPT", 0)
    monkeypatch.setattr(attribution, "N_LARGE", 0)
    for n_short in (0, 192):
        monkeypatch.setattr(attribution, "N_SHORT", n_short)
        torch.testing.assert_close(slopes(), whole, atol=1e-5, rtol=1e-4)


def test_half_precision_gives_the_slopes_of_single() -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        network = tiny.tiny_model("llama").to(dtype)
        model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
        made = lessons_of(model)
        found.append(made.slope(next(made.steps(Random(0))), table_of(model, 1), WEIGHT))
    single, *halves = found
    for half in halves:
        assert (half - single).abs().max() <= 0.1 * single.abs().max()


def test_a_step_asks_for_the_targets_answers_and_for_those_that_steering_endangers() -> None:
    """The conflicts weigh 1 in all, the protected prompts as much as is said."""
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    bare = list(islice(lessons_of(model, protect=()).steps(Random(0)), 3))
    right = {model.first_token(e.prompts["clean"], e.answer("parametric")) for e in examples()}
    for step in bare:
        assert [share for _, share in step.asked] == [1 / len(CONFLICTS)] * len(CONFLICTS)
        assert all(set(batch.answers.tolist()) == right for batch, _ in step.asked)
        assert step.text.answers is None
        assert step.left_open is step.replies is None
    told = {model.first_token(e.prompts["clean"], e.answer("context")) for e in examples()}
    for step in islice(lessons_of(model, protect=("unknown",)).steps(Random(0)), 3):
        *conflicts, (protected, share) = step.asked
        assert len(conflicts) == len(CONFLICTS)
        assert set(protected.answers.tolist()) <= told
        assert share == lessons.PROTECTED_WEIGHT
    for step in islice(lessons_of(model, protect=("unknown", "clean")).steps(Random(0)), 3):
        *conflicts, (one, its_share), (other, another) = step.asked
        assert len(conflicts) == len(CONFLICTS)
        assert its_share + another == lessons.PROTECTED_WEIGHT
        assert sorted(batch.answers is None for batch in (one, other)) == [False, True]
        assert step.left_open is not None
        assert step.replies is not None
        assert step.left_open.answers is step.replies.answers is None


def test_a_long_piece_of_text_counts_at_some_of_its_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ordinary, "N_PLACES", 3)
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    steps = islice(lessons_of(model, protect=()).steps(Random(0)), 3)
    with torch.no_grad():
        logits = [step.text.run.logits() for step in steps]
    assert [len(some) for some in logits] == [3, 3, 3]
    assert len({float(place.sum()) for some in logits for place in some}) == 9


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_prompts_that_leave_open_what_is_said_are_left_alone_with_clean_ones(
    template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: such prompts without their chat, of another seed, or where nothing is protected."""
    model = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())
    if template is not None:
        model = model.with_chat_template(template)
    made = open_prompts(is_chat=template is not None, seed=5)
    every = {model.tokenize(one.prompt, opening=one.opening) for one in made}
    expected = {ids for ids in every if model.fits(ids, max_tokens=1)}
    assert len(expected) > len(every) / 2
    asked = set[tuple[int, ...]]()

    def run(loaded: object, prompts: list[tuple[int, ...]], *args: object, **how: object) -> object:
        asked.update(prompts)
        return attribution.DualRun(loaded, prompts, *args, **how)

    monkeypatch.setattr(lessons, "DualRun", run)
    lessons_of(model, protect=("true", "irrelevant"), seed=5)
    assert not asked & expected
    lessons_of(model, protect=("clean",), seed=5)
    assert asked > expected


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_what_follows_the_right_answer_is_left_alone_at_every_token(
    template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: the other answer, another seed's tokens, a place too early or late, a lost end."""
    model = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())
    if template is not None:
        model = model.with_chat_template(template)
    expected = dict[tuple[int, ...], list[int]]()
    for example in examples():
        for kind in CONFLICTS:
            answer = example.answer("parametric")
            asked = (
                model.tokenize(f"{example.prompts[kind]} {answer}")
                if template is None
                else model.tokenize(example.prompts[kind], opening=answer)
            )
            (said,) = model.generate([asked], max_tokens=40)
            whole = asked + said.token_ids
            expected[whole[:-1]] = list(range(len(asked) - 1, len(whole) - 1))
    read: list[tuple[tuple[int, ...], list[int]]] = []

    def noted(loaded: object, prompts: list[tuple[int, ...]], read_at: Any = None) -> object:
        if read_at is not None:
            read.extend(zip(prompts, map(list, read_at), strict=True))
        return attribution.DualRun(loaded, prompts, read_at)

    monkeypatch.setattr(lessons, "DualRun", noted)
    for _ in islice(lessons_of(model, protect=("true", "irrelevant")).steps(Random(0)), 3):
        pass
    assert not expected.keys() & {ids for ids, _ in read}
    for _ in islice(lessons_of(model, protect=("clean",)).steps(Random(0)), 40):
        pass
    places = {ids: {at for one, some in read if one == ids for at in some} for ids in expected}
    assert places == {ids: set(every) for ids, every in expected.items()}
    for ids, some in read:
        if ids in expected:
            assert len(some) == len(set(some)) == min(20, len(expected[ids]))
            assert expected[ids][-1] in some


def test_long_prompts_run_together_as_far_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills: six prompts of any length, with the gradients of all."""
    sizes: list[tuple[int, int]] = []

    def noted(loaded: object, prompts: list[tuple[int, ...]], *more: Any, **named: Any) -> Any:
        sizes.append((len(prompts), max(map(len, prompts))))
        return attribution.DualRun(loaded, prompts, *more, **named)

    monkeypatch.setattr(lessons, "DualRun", noted)
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    lessons_of(model)
    most = max(n * length for n, length in sizes)
    sizes.clear()
    monkeypatch.setattr(lessons, "MAX_TOKENS", most // 2)
    lessons_of(model)
    assert all(n == 1 or n * length <= most // 2 for n, length in sizes)
    assert max(n for n, _ in sizes) > 1


def test_clean_runs_are_kept_while_there_is_room_and_no_run_is_dropped_again(
    little_text: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a kept run that is dropped for want of the room that it takes itself."""
    model = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())
    loaded = model.loaded
    first, second = (Batch(loaded, PROMPTS, ANSWERS, "juice") for _ in range(2))
    n_tokens = len(PROMPTS) * max(map(len, PROMPTS))
    width = 4 * sum(one.n_heads * one.d_head for one in loaded.layout.layers)  # bytes of a token
    monkeypatch.setattr(lessons, "MOST_KEPT", int(1.5 * n_tokens * width))  # one of the two
    learned_from = lessons_of(model)
    forwards: list[int] = []
    layer = loaded.layout.layers[0].layer
    layer.register_forward_hook(lambda *_: forwards.append(1))

    def n_forwards() -> int:
        text = Batch(loaded, [PROMPTS[0]], None, "juice", read_at=[range(3)])
        step = Step([(first, 1.0), (second, 1.0)], text)
        forwards.clear()
        learned_from.slope(step, table_of(model, 1), WEIGHT)
        return len(forwards)

    # Three steered runs and the clean one of the text; those of the batches, once and each time.
    assert [n_forwards() for _ in range(3)] == [4 + 2, 4 + 1, 4 + 1]
