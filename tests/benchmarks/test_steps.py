"""What a step takes is that of the steps without prompts, however uneven requests begin and end.

Catches a rate of decoding with time of prompts in it, which hid what a step of many requests takes.
"""

from __future__ import annotations

import pytest

from benchmarks.steps import step_s

PROMPT_S, STEP_S, N_TOKENS = 3.0, 0.25, 8


def test_one_request() -> None:
    assert step_s([[2.0, 2.5, 3.0, 3.5]]) == pytest.approx(0.5)


def test_a_static_batch() -> None:
    assert step_s([[2.0, 2.5, 3.0]] * 5) == pytest.approx(0.5)


@pytest.mark.parametrize("n_waves", [1, 2, 3])
@pytest.mark.parametrize("gap_s", [0.0, 1e-4])
def test_requests_that_join_while_others_decode(n_waves: int, gap_s: float) -> None:
    """Waves of two prompts, all earlier ones in each forward; tokens of one are a gap apart."""
    arrivals: list[list[float]] = [[] for _ in range(2 * n_waves)]
    now = 0.0
    n_joined = 0
    while any(len(own) < N_TOKENS for own in arrivals):
        is_prompt = n_joined < len(arrivals)
        n_joined += 2 * is_prompt
        running = [own for own in arrivals[:n_joined] if len(own) < N_TOKENS]
        # A step takes time for each that is in it.
        now += STEP_S * len(running) / len(arrivals) + PROMPT_S * is_prompt
        for i, own in enumerate(running):
            own.append(now + i * gap_s)
    assert step_s(arrivals) == pytest.approx(STEP_S, rel=0.02)


def test_tokens_that_come_together_count_each() -> None:
    assert step_s([[1.0, 1.0, 2.0, 2.0]]) == pytest.approx(0.5)
