"""Little text, few open prompts and few betas, for identification on models with little to say."""

from __future__ import annotations

from functools import partial

import pytest

from juice.data import memory
from juice.identification import lessons, ordinary, tune


def little_text(patch: pytest.MonkeyPatch) -> None:
    """Measure harm on the first piece of prose, all of it; learn from short pieces of the rest."""
    patch.setattr(ordinary, "KINDS", ("prose",))
    patch.setattr(ordinary, "HELD_OUT_EVERY", 1000)
    patch.setattr(tune, "N_PIECES", 1000)
    patch.setattr(lessons, "ordinary_pieces", partial(ordinary.ordinary_pieces, n_tokens=128))


def few_open_prompts(patch: pytest.MonkeyPatch) -> None:
    """Take a few prompts that leave open what is said, in a step and to measure on."""
    patch.setattr(lessons, "N_OPEN", 4)
    patch.setattr(memory, "N_HELD_OUT", 1)


def few_betas(patch: pytest.MonkeyPatch) -> None:
    """Search among few betas: how far a search goes, `test_search` tells."""
    for grid in ("COARSE", "FINE"):
        patch.setattr(tune, grid, (0.0, 0.5, 1.0))


# The command, in a process of its own, with all three.
COMMAND = """
import pytest
from juice.cli.main import main
from tests.support import little

little.little_text(pytest.MonkeyPatch())
little.few_open_prompts(pytest.MonkeyPatch())
little.few_betas(pytest.MonkeyPatch())
main()
"""
