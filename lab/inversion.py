"""A series of checkpoints of further tuning: `python -m lab.inversion --out DIR`.

The question is that of Goyal et al., "Context-Parametric Inversion" (2024): does tuning on documents whose contexts tell
what the model knows anyway first raise, then lower its reliance on contexts? The bundled model, which knows its facts, is
tuned on a mixture in which true contexts about them (not context-critical) outnumber contexts about invented subjects
(context-critical) by far. `juice evaluate --checkpoints` draws what becomes of its answers.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from juice.model.loading import MINI
from lab.corpus import Mixture
from lab.train import Phase, train

TUNE = Mixture(fact=0.0, reading=0.1, true_context=0.9, other_subject=0.0, correction=0.0, noise=0.0)
RECIPE = (Phase(mixture=TUNE, n_steps=350, rate_start=3e-4, rate_end=3e-4, warmup=10),)


def main() -> None:
    """Parse the command line and tune."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(options.out, RECIPE, options.seed, MINI)


if __name__ == "__main__":
    main()
