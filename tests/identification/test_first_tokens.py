"""First tokens read outside the engine are those that the engine serves."""

from __future__ import annotations

import math
from statistics import mean

import pytest

import juice
from juice.engine.steer import Steering, unsteered
from juice.identification import attribution as dual_run
from juice.identification import first_tokens
from juice.identification.first_tokens import FirstTokens
from juice.progress import silent
from tests.support import tiny

EVERY = tuple(range(tiny.VOCAB_SIZE))
GROUPS = {
    "some": [((5, 9, 2, 7, 1, 30), 17), ((3, 3, 8), 40), ((11, 4), 2)],
    "others": [((7,) * 20, 3), ((1, 2, 3, 4), 9)],
    "none": [],
}


def steerings(model: juice.SteeredModel) -> list[Steering]:
    ways = [
        ([(0, 1), (3, 2)], 2.0, "juice"),
        ([(0, 1), (3, 2)], 2.0, "june"),
        ([(2, 0)], 5.0, "juice"),
    ]
    first, *others = [
        model.resolve(
            juice.Steer(
                target="context",
                head_set=model.make_head_set(
                    name="own", target="context", plus=plus, beta_plus=beta, method=method
                ),
                method=method,
            )
        )
        for plus, beta, method in ways
    ]
    return [first, unsteered(), *others]


@pytest.mark.parametrize("most", [1 << 20, 1])
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_readings_are_what_the_engine_serves(
    shape: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a clean run of other prompts, and one where a single run's z is meant."""
    monkeypatch.setattr(dual_run, "MAX_TOKENS", most)
    monkeypatch.setattr(first_tokens, "MOST_KEPT", most)
    with juice.load(tiny.tiny_model(shape), tokenizer=tiny.tiny_tokenizer()) as model:
        tried = steerings(model)
        tokens = FirstTokens(model.loaded, GROUPS)
        tokens.read(tried[:1], silent, "")
        found = tokens.read(tried, silent, "")
        for reading, steering in zip(found, tried, strict=True):
            assert list(reading.lead) == list(reading.right) == ["some", "others"]
            for name in reading.lead:
                done = model.engine.generate(
                    [
                        model.request(ids, max_tokens=1, watch=EVERY).with_steering(steering)
                        for ids, _ in GROUPS[name]
                    ]
                )
                leads, hits = [], []
                for completion, (_, token) in zip(done, GROUPS[name], strict=True):
                    p = [math.exp(logprob) for logprob in completion.watched]
                    other = max(p[:token] + p[token + 1 :])
                    leads.append(p[token] / (p[token] + other))
                    hits.append(completion.tokens[0].id == token)
                assert reading.lead[name] == pytest.approx(mean(leads), abs=1e-5)
                assert reading.right[name] == pytest.approx(mean(hits))
        assert len({reading.lead["some"] for reading in found}) == 4
