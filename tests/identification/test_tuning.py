"""The choice of betas on validation examples, and how their answers are judged."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import juice
from juice.data.example import ConflictExample
from juice.identification import validation
from juice.identification.trials import answer, outcome
from juice.identification.tuning import GRID_MINUS, GRID_PLUS
from tests.support import tiny
from tests.support.conflicts import examples


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
