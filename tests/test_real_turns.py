"""What `integration.real.turns` reports, on the bundled model instead of a real one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

import juice
from integration.real import turns
from integration.real.answers import Way
from integration.real.chat import N_TOKENS, chat_prompts, holds
from juice.engine.steer import Steer
from juice.formula import TARGETS

HEAD_SETS = Path(__file__).parents[1] / "head_sets"
LAST = 3


@pytest.fixture(scope="module")
def mini() -> Iterator[juice.SteeredModel]:
    with juice.load("mini", head_sets=HEAD_SETS) as model:
        yield model.with_chat_template()


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "N_TURNS", LAST)


@pytest.mark.parametrize("positions", ["all", "question"])
def test_a_chat_goes_on_with_its_replies(mini: juice.SteeredModel, positions: str) -> None:
    """The oracle writes the chat by hand, and asks for one token's probabilities at a time."""
    steer = Steer(target="context", positions=positions)
    rows = {r["measure"]: r for r in turns.in_turns(mini, Way("one", steer), 1)}
    prompts = chat_prompts()[: 2 * LAST : 2]
    text = "<|begin|>"
    for turn, prompt in enumerate(prompts, start=1):
        text += f"<|user|>{prompt.document} {prompt.question}<|end|><|assistant|>"
        ids = mini.prompts.encode(text)
        at = len(mini.prompts.encode(text[: text.rindex(prompt.question)].rstrip()))
        asked = {"steer": steer, "question_at": at}
        reply = mini.generate([ids], max_tokens=N_TOKENS, **asked)[0].text
        if turn in (1, LAST):
            for kind in ("memory", "context"):
                share = rows[f"turn {turn}, {kind}"]["share"]
                assert share == holds(reply, getattr(prompt, kind))
            drawn = mini.generate([ids], max_tokens=N_TOKENS, temperature=1.0, seed=0)[0]
            nats, before = [], ids
            for token in drawn.tokens:
                plain, steered = (
                    mini.engine.generate(
                        [mini.request(before, max_tokens=1, watch=(token.id,), **o)]
                    )
                    for o in ({}, asked)
                )
                nats.append(plain[0].watched[0] - steered[0].watched[0])
                before = (*before, token.id)
            found = rows[f"turn {turn}, divergence"]["divergence"]
            assert math.isclose(found, fmean(nats), abs_tol=1e-4)
            assert abs(found) > 1e-3
            assert rows[f"turn {turn}, divergence"]["interval"] is None
        text += f"{reply.strip()}<|end|>"


def test_the_interval_of_divergences_is_as_wide_as_chats_differ() -> None:
    """They are nats, of no bound. The oracle is a table: t is 4.3027 at two degrees of freedom."""
    low, high = turns.interval_over_chats([1.0, 2.0, 6.0]) or (0, 0)
    half = 4.3027 * math.sqrt(7 / 3)
    assert (low, high) == pytest.approx((3 - half, 3 + half), abs=1e-3)


def test_the_first_turns_are_about_the_same_as_the_last() -> None:
    talks = turns.talks_of(chat_prompts(), turns.N_CHATS)
    first, last = ({talk.prompts[turn].question for talk in talks} for turn in (0, LAST - 1))
    assert first == last
    assert len(first) == turns.N_CHATS
    assert all(len({p.question for p in talk.prompts}) == LAST for talk in talks)


def test_each_set_steers_everywhere_and_from_the_question_on(mini: juice.SteeredModel) -> None:
    ways = [(way.steer.target, way.steer.positions) for way in turns.ways_in_turns(mini)]
    assert ways[0] == ("none", "all")
    assert set(ways[1:]) == {(t, p) for t in TARGETS for p in ("all", "question")}
    assert len(ways) == 5
