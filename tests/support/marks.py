"""Marks that several test files share."""

from __future__ import annotations

import pytest

from tests.support.tiny import SHAPES

# Warnings that an evaluation on a few examples always gives.
FEW_EXAMPLES = pytest.mark.filterwarnings(
    "ignore:.*(tune the betas|choose betas|cannot be scored|is left out|no validation example|no"
    " head raises|not recognised|are tested on|that find the heads|heads found on so few|head set"
    " toward).*:UserWarning"
)
# One shape in `make test`, the others in `make test-long`.
ONE_SHAPE = [SHAPES[0], *(pytest.param(shape, marks=pytest.mark.long) for shape in SHAPES[1:])]
