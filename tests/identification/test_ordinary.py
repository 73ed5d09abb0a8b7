"""The harm to ordinary text against its definition: two runs, one piece at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from random import Random

import pytest
import torch
from transformers import PreTrainedModel

import juice
from juice.engine.steer import Steering, unsteered
from juice.errors import JuiceError
from juice.identification import ordinary
from juice.identification.attribution import DualRun
from juice.identification.ordinary import (
    OrdinaryText,
    Places,
    every_place,
    its_end,
    ordinary_pieces,
    some_places,
)
from juice.model import definition
from juice.progress import silent
from tests.support import chat_templates, oracle, tiny
from tests.support.architectures import SWITCH, build

FP32 = 1e-5  # nats a token
PIECES = [(5, 200, 7, 31, 90, 150, 12, 260, 3, 77, 18, 42), (9, 4, 61), (8,), (33, 2, 17, 40, 6)]
HEADS = {(1, 2): 1.4, (2, 0): -0.7, (2, 3): -0.7}


def harm_of(
    network: PreTrainedModel,
    pieces: Sequence[Sequence[int]],
    heads: Mapping[tuple[int, int], float],
    method: str,
) -> tuple[float, float]:
    """Return the divergence at all places, and the quotient of the perplexities."""
    nats, surprise, n_places, n_next = 0.0, {"clean": 0.0, "steered": 0.0}, 0, 0
    for piece in pieces:
        ids = list(piece)
        logits = {
            "clean": oracle.forward(network, ids)[0],
            "steered": oracle.steered_logits(network, ids, heads, method=method),
        }
        for at in range(len(ids)):
            nats += oracle.relative_entropy(logits["clean"][at], logits["steered"][at])
            n_places += 1
        for at, following in enumerate(ids[1:]):
            for run in surprise:
                surprise[run] -= math.log(float(logits[run][at].double().softmax(-1)[following]))
            n_next += 1
    clean, steered = (math.exp(total / n_next) for total in surprise.values())
    return nats / n_places, steered / clean


def steered_by(
    model: juice.SteeredModel, heads: Mapping[tuple[int, int], float], method: str
) -> Steering:
    signed = {
        sign: [head for head, beta in heads.items() if (beta > 0) == (sign == "plus")]
        for sign in ("plus", "minus")
    }
    betas = {f"beta_{sign}": [heads[head] for head in signed[sign]] for sign in signed}
    made = model.make_head_set(name="own", target="context", method=method, **signed, **betas)
    return model.resolve(juice.Steer(target="context", head_set=made, method=method))


@pytest.mark.parametrize("most_logits", [definition.MOST_LOGITS, 1])
@pytest.mark.parametrize("method", ["juice", "june"])
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_harm_is_that_of_the_two_runs_piece_by_piece(
    shape: str, method: str, most_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: padding that counts, KL the other way round, the last place's next token, one z."""
    monkeypatch.setattr(definition, "MOST_LOGITS", most_logits)
    model = juice.load(tiny.tiny_model(shape), tokenizer=tiny.tiny_tokenizer())
    twice = {head: 2 * beta for head, beta in HEADS.items()}
    tried = [steered_by(model, HEADS, method), unsteered(), steered_by(model, twice, method)]
    one, none, two = OrdinaryText(model.loaded, PIECES).harm(tried, silent, "")
    for found, heads in ((one, HEADS), (two, twice)):
        nats, perplexity = harm_of(tiny.tiny_model(shape), PIECES, heads, method)
        assert found.divergence == pytest.approx(nats, abs=FP32)
        assert found.perplexity == pytest.approx(perplexity, rel=FP32)
    assert none.divergence == pytest.approx(0, abs=FP32)
    assert none.perplexity == pytest.approx(1, rel=FP32)
    assert two.divergence > one.divergence > 0.01


def test_pieces_on_both_sides_of_a_switch_of_positions_are_not_padded_together() -> None:
    """Kills: the short piece padded beyond the switch, with the long one's frequencies."""
    long = tuple(1 + i % 90 for i in range(SWITCH + 4))
    model = juice.load(build("Phi-3 (longrope)"), tokenizer=tiny.tiny_tokenizer())
    pieces, steering = [long, long[:-8]], steered_by(model, HEADS, "juice")
    together, *apart = (
        OrdinaryText(model.loaded, some).harm([steering], silent, "")[0].divergence
        * sum(map(len, some))
        for some in (pieces, pieces[:1], pieces[1:])
    )
    assert together == pytest.approx(sum(apart), abs=FP32 * len(long))


@pytest.mark.parametrize(
    ("places", "n_held", "n_runs"), [(every_place, 100, 1), (every_place, 1, 3), (its_end, 1, 1)]
)
def test_a_clean_run_is_kept_for_other_ways_where_few_places_are_read(
    places: Places, n_held: int, n_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a clean run for each call, and z of a kept one that was never recorded."""
    model = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())
    n_logits = n_held * model.loaded.model.config.vocab_size
    monkeypatch.setattr(definition, "MOST_LOGITS", n_logits)
    ways = [[steered_by(model, HEADS, method)] for method in ("june", "juice", "juice", "juice")]
    expected = [
        OrdinaryText(model.loaded, PIECES[:1], places).harm(way, silent, "") for way in ways
    ]
    recorded, record = [], DualRun.record
    monkeypatch.setattr(DualRun, "record", lambda run: recorded.append(run) or record(run))
    text = OrdinaryText(model.loaded, PIECES[:1], places)
    assert [text.harm(way, silent, "") for way in ways] == expected
    assert len(recorded) == n_runs


@pytest.mark.parametrize("places", [its_end, some_places])
@pytest.mark.parametrize("method", ["juice", "june"])
def test_pieces_are_read_at_their_places_alone(
    method: str, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: the ends of padding, what is said elsewhere, and another place's next token."""
    monkeypatch.setattr(ordinary, "N_PLACES", 2)
    model, plain = (tiny.tiny_model("llama") for _ in range(2))
    loaded = juice.load(model, tokenizer=tiny.tiny_tokenizer())
    text = OrdinaryText(loaded.loaded, PIECES, places)
    (found,) = text.harm([steered_by(loaded, HEADS, method)], silent, "")
    nats, surprises = list[float](), list[float]()
    for piece in PIECES:
        clean = oracle.forward(plain, list(piece))[0].log_softmax(-1)
        steered = oracle.steered_logits(plain, list(piece), HEADS, method=method).log_softmax(-1)
        read_at = places(piece)
        assert len(read_at) <= 2
        nats += [oracle.relative_entropy(clean[at], steered[at]) for at in read_at]
        surprises += [
            float(clean[at, piece[at + 1]] - steered[at, piece[at + 1]])
            for at in read_at
            if at + 1 < len(piece)
        ]
    assert found.divergence == pytest.approx(sum(nats) / len(nats), abs=FP32)
    expected = math.exp(sum(surprises) / max(1, len(surprises)))
    assert found.perplexity == pytest.approx(expected, rel=FP32)
    assert bool(surprises) == (places is some_places)
    assert found.divergence > 0.01


@pytest.mark.parametrize("method", ["juice", "june"])
def test_minis_harm_is_that_of_the_two_runs(mini: juice.SteeredModel, method: str) -> None:
    heads = {(5, 7): 0.8, (3, 6): 0.5, (5, 0): -1.0, (0, 3): -0.6}
    pieces = ordinary_pieces(mini).held_out[::30]
    (found,) = OrdinaryText(mini.loaded, pieces).harm([steered_by(mini, heads, method)], silent, "")
    nats, perplexity = harm_of(mini.loaded.model, pieces, heads, method)
    assert found.divergence == pytest.approx(nats, abs=FP32)
    assert found.perplexity == pytest.approx(perplexity, rel=10 * FP32)
    assert nats > 0.01


@pytest.mark.parametrize("template", [None, chat_templates.PLAIN])
@pytest.mark.parametrize(("n_tokens", "longest"), [(48, 48), (ordinary.N_TOKENS, 128)])
def test_every_piece_begins_as_a_text_does_and_fits(
    n_tokens: int, longest: int, template: str | None
) -> None:
    """In a chat as well, whose template does not belong to ordinary text."""
    model = juice.load(tiny.tiny_model("llama"), tokenizer=chat_templates.tokenizer(template))
    model = model if template is None else model.with_chat_template()
    pieces = ordinary_pieces(model, n_tokens)
    every = [*pieces.learned_from, *pieces.held_out]
    assert max(map(len, every)) == longest
    assert min(map(len, every)) >= ordinary.N_LEAST
    assert all(piece[0] == 0 and 0 not in piece[1:] for piece in every)
    assert not set(pieces.learned_from) & set(pieces.held_out)
    assert len(pieces.learned_from) > 2 * len(pieces.held_out)
    texts = [model.loaded.tokenizer.decode(piece[1:]) for piece in pieces.held_out]
    for kind in ordinary.KINDS:
        text = (ordinary.TEXT / f"{kind}.txt").read_text(encoding="utf-8")
        assert any(one[:40] in text for one in texts), kind


def test_a_tokenizer_without_a_start_token_loses_no_text() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    pieces = ordinary_pieces(model, 100).held_out
    text = (ordinary.TEXT / "prose.txt").read_text(encoding="utf-8").strip()
    passages = text.split(ordinary.BETWEEN)[:: ordinary.HELD_OUT_EVERY]
    whole = tuple(model.loaded.tokenizer("\n\n".join(passages))["input_ids"])
    n = len(whole) // 100
    assert n > 10
    assert sum(pieces[:n], ()) == whole[: 100 * n]


def test_pieces_are_cut_from_a_longer_text_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The tokenizer would warn of indexing errors, which pieces do not cause."""
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.model_max_length = 128
    model = juice.load(tiny.tiny_model("llama"), tokenizer=tokenizer)
    logger = logging.getLogger("transformers")
    caplog.set_level(logging.WARNING, logger="transformers")
    logger.addHandler(caplog.handler)
    try:
        assert ordinary_pieces(model).held_out
        assert not caplog.records
        tokenizer("a " * 200)
        assert caplog.records, "it would have been seen"
    finally:
        logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("dtype", "method"),
    [
        (torch.float32, "juice"),
        (torch.bfloat16, "june"),
        pytest.param(torch.float16, "juice", marks=pytest.mark.long),
        pytest.param(torch.float32, "june", marks=pytest.mark.long),
        pytest.param(torch.bfloat16, "juice", marks=pytest.mark.long),
        (torch.float16, "june"),
    ],
)
def test_responses_tell_how_far_small_coefficients_make_text_diverge(
    dtype: torch.dtype, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of c F c, against two runs a piece. Few drawn tokens tell it only so well.

    Kills: the sum of a piece's tokens for their mean, a piece's padding, another half precision.
    """
    pieces = [tuple(Random(i).sample(range(300), 6 + i % 5)) for i in range(60)]
    monkeypatch.setattr(ordinary, "ordinary_pieces", lambda *_: ordinary.Pieces(pieces, []))
    monkeypatch.setattr(ordinary, "MOST_TIMES", 1000.0)
    network = tiny.tiny_model("llama")
    model = juice.load(tiny.tiny_model("llama").to(dtype), tokenizer=tiny.tiny_tokenizer())
    responses = ordinary.responses(model, silent)
    assert len(responses) == len(pieces)
    told, true = [], []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        table = 0.05 * torch.randn(tiny.N_LAYERS, tiny.N_HEADS, generator=generator)
        heads = {(i, j): float(table[i, j]) for i, j in table.nonzero().tolist()}
        true.append(harm_of(network, pieces, heads, method)[0])
        told.append(ordinary.expected_divergence(responses, table))
    assert sum(told) == pytest.approx(sum(true), rel=0.35)


def test_prompts_that_leave_open_what_is_said_respond_at_their_ends_and_count_as_much_as_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills: tokens drawn within a prompt, text that outweighs them, a root of their length."""
    pieces, prompts = (
        [tuple(Random(f"{kind} {i}").sample(range(300), 6 + i % 5)) for i in range(n)]
        for kind, n in (("text", 90), ("prompt", 70))
    )
    monkeypatch.setattr(ordinary, "ordinary_pieces", lambda *_: ordinary.Pieces(pieces, []))
    monkeypatch.setattr(ordinary, "MOST_TIMES", 1000.0)
    monkeypatch.setattr(ordinary, "N_RESPONSES", 60)
    network = tiny.tiny_model("llama")
    model = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())
    of_text, of_both = (ordinary.responses(model, silent, some) for some in ((), prompts))
    assert (len(of_text), len(of_both)) == (60, 120)
    torch.testing.assert_close(of_both[:60], of_text)
    told, true = [], []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        table = 0.05 * torch.randn(tiny.N_LAYERS, tiny.N_HEADS, generator=generator)
        heads = {(i, j): float(table[i, j]) for i, j in table.nonzero().tolist()}
        for ids in prompts:
            clean = oracle.forward(network, list(ids))[0][-1]
            steered = oracle.steered_logits(network, list(ids), heads, method="june")[-1]
            true.append(oracle.relative_entropy(clean, steered) / len(prompts))
        told.append(ordinary.expected_divergence(of_both[60:], table))
    assert sum(told) == pytest.approx(sum(true), rel=0.35)


def test_activations_that_overflow_are_an_error_with_the_remedy() -> None:
    model = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())
    model.loaded.model.lm_head.weight.data.fill_(torch.inf)
    with pytest.raises(JuiceError, match="--dtype float32"):
        ordinary.responses(model, silent)


def test_activations_that_overflow_when_steered_are_the_greatest_harm() -> None:
    model = juice.load(tiny.tiny_model("llama").half(), tokenizer=tiny.tiny_tokenizer())
    tried = [steered_by(model, {(0, 0): 99.0, (1, 0): -1.0}, "june"), unsteered()]
    model.loaded.model.model.layers[0].self_attn.o_proj.weight.data.mul_(1e4)
    overflowing, none = OrdinaryText(model.loaded, PIECES).harm(tried, silent, "")
    assert overflowing.divergence == ordinary.MOST_NATS
    assert none.divergence == 0


def test_a_token_that_cannot_come_hides_no_divergence() -> None:
    clean = torch.tensor([[0.5, 0.5, 0.0]]).log()
    steered = torch.tensor([[0.9, 0.1, 0.0]]).log()
    by_hand = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert float(ordinary.divergence(clean, steered)) == pytest.approx(by_hand)


def test_divergence_and_its_derivatives_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two places at a time, the last alone; a token cannot come. Kills: rows of another place."""
    monkeypatch.setattr(ordinary, "MOST_AT_A_TIME", 23)
    generator = torch.Generator().manual_seed(0)
    unsteered, steered = torch.randn(2, 5, 11, generator=generator)
    weights = torch.rand(5, generator=generator)
    unsteered[1:3, 4] = steered[1:3, 4] = -torch.inf
    clean = unsteered.log_softmax(-1)
    given, expected = steered.clone().requires_grad_(), steered.double().requires_grad_()
    nats = [
        -torch.distributions.Categorical(logits=row.double()).entropy()
        - (row.exp().double() * place.log_softmax(-1).nan_to_num(neginf=0.0)).sum()
        for row, place in zip(clean, expected, strict=True)
    ]
    found = ordinary.divergence(clean, given)
    torch.testing.assert_close(found.double(), torch.stack(nats), rtol=1e-5, atol=1e-6)
    (found * weights).sum().backward()
    (torch.stack(nats) * weights).sum().backward()
    torch.testing.assert_close(given.grad.double(), expected.grad, rtol=1e-5, atol=1e-6)


def test_few_pieces_do_not_decide_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())
    given = []
    for most in (1000.0, 1.1):
        monkeypatch.setattr(ordinary, "MOST_TIMES", most)
        given.append(ordinary.responses(model, silent).flatten(1).norm(dim=1))
    free, bounded = given
    assert free.max() > 1.2 * free.median()
    assert bounded.max() == pytest.approx(1.1 * float(free.median()))
    torch.testing.assert_close(bounded, free.clamp(max=float(bounded.max())))
