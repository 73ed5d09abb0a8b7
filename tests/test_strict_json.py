"""Strict JSON."""

from __future__ import annotations

import json

import pytest

from juice.files import without_twins


def test_a_name_that_is_given_twice_is_refused_at_any_depth() -> None:
    with pytest.raises(ValueError, match="b is given twice"):
        json.loads('[{"a": {"b": 1, "c": 2, "b": 1}}]', object_pairs_hook=without_twins)
    assert json.loads('{"a": {"b": 1}}', object_pairs_hook=without_twins) == {"a": {"b": 1}}


def test_an_object_of_many_names_takes_no_time() -> None:
    """Kills: counting every name among all others, which took minutes for a body of 2 MiB."""
    names = ",".join(f'"{i}": 0' for i in range(200_000))
    content = json.loads("{" + names + "}", object_pairs_hook=without_twins)
    assert len(content) == 200_000
    with pytest.raises(ValueError, match="7 is given twice"):
        json.loads("{" + names + ', "7": 0}', object_pairs_hook=without_twins)
