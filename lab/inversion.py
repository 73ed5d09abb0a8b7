"""Tune the bundled model further and save checkpoints: `python -m lab.inversion --out DIR`.

The question is that of Goyal et al., "Context-Parametric Inversion" (2024): does tuning first
raise, then lower a model's reliance on contexts, once most documents have contexts that repeat what
it already knows? The bundled model, which knows its facts, is tuned in two phases:

    READ   nine true contexts about known subjects to one about an invented subject, for which only
           the context has the answer
    KNOW   no more invented subjects: true contexts, facts without a context, and one document in a
           hundred whose context is about another subject than its question, as retrieval can bring

`juice evaluate --checkpoints DIR` plots how its answers change.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from juice.files import MINI
from lab.corpus import Mixture
from lab.train import Phase, Trainer

SAVE_EVERY = 35
READ = Mixture(reading=0.1, true_context=0.9)
KNOW = Mixture(fact=0.3, true_context=0.69, other_subject=0.01)
PHASES = (
    Phase(mixture=READ, n_steps=140, rate_start=2e-3, rate_end=2e-3, warmup=10),
    Phase(mixture=KNOW, n_steps=210, rate_start=2e-3, rate_end=2e-3, warmup=10),
)


def run(out: Path, seed: int) -> None:
    """Tune the bundled model and save `out/step-N`."""
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    model = AutoModelForCausalLM.from_pretrained(MINI, dtype="float32")

    done = 0

    def save(step: int) -> None:
        """Save the weights after some of a phase's steps."""
        if (done + step) % SAVE_EVERY == 0:
            folder = out / f"step-{done + step}"
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

    save(0)
    for phase in PHASES:
        Trainer(model, tokenizer, phase, seed + 1).run(save)
        done += phase.n_steps


def main() -> None:
    """Parse the command line and tune."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run(options.out, options.seed)


if __name__ == "__main__":
    main()
