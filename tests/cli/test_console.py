"""Progress where nobody sees a bar: lines in a log, none for short work."""

from __future__ import annotations

import pytest

from juice.cli import console


def test_long_work_made_of_short_pieces_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forty pieces of two seconds: each is shorter than what a line waits for."""
    now = 1000.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    monkeypatch.setattr(console._Lines, "said", 0.0)
    monkeypatch.setattr(console._Lines, "moved", 0.0)
    for piece in range(40):
        with console.progress(f"piece {piece}", 2) as advance:
            for _ in range(2):
                now += 1.0
                advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 8
    assert lines[0] == "juice: piece 4: 2 of 2"


def test_short_work_has_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long the model took to load before."""
    monkeypatch.setattr(console._Lines, "said", 0.0)
    monkeypatch.setattr(console._Lines, "moved", 0.0)
    with console.progress("short", 2) as advance:
        advance(2)
    assert capsys.readouterr().err == ""
