"""Strict JSON: an object has every name once; programs differ in which of two they take."""

from __future__ import annotations

from typing import Any


def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object from its pairs, for `object_pairs_hook`.

    Raises ValueError for a name that is given twice.
    """
    found = dict[str, Any]()
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} is given twice; give it once")
        found[name] = value
    return found
