"""Train the bundled model: `python -m lab.recipe --out DIR [--seed N] [--resume]`.

A Llama of 5M parameters, on the corpus of `lab.corpus`, in one go:

    1. LEARN: the facts, without wrong statements.
    2. DOUBT: a quarter of the lone statements is wrong, as on the web.
    3. From there two short endings, one with contexts about other subjects and corrections of wrong
       statements, which teach a model to trust its memory, and one without.
    4. The mean of the two that leans to neither side under conflicts (`lab.balance`).

Weights are saved after every `SAVE_EVERY` steps, with what the model then answers; `--resume` goes
on after the last phase that is complete.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lab.balance import balance
from lab.corpus import Mixture
from lab.measure import first_token_shares
from lab.tokens import N_POSITIONS, VOCAB_SIZE, train_tokenizer
from lab.train import Phase, train

LOG = logging.getLogger("lab.recipe")
SAVE_EVERY = 300

LEARN = Mixture(
    fact=0.46,
    several_facts=0.05,
    reading=0.29,
    true_context=0.15,
    other_subject=0.03,
    correction=0.02,
)
DOUBT = replace(LEARN, noise=0.25)
TRUST_MEMORY = replace(DOUBT, other_subject=0.1, correction=0.05)
TRUST_CONTEXT = replace(DOUBT, other_subject=0.0, correction=0.0)
MIXTURES = (LEARN, DOUBT, TRUST_MEMORY, TRUST_CONTEXT)

TRUNK = {
    "learn": Phase(mixture=LEARN, n_steps=3500, rate_start=7e-3, rate_end=2e-3, warmup=60),
    "doubt": Phase(mixture=DOUBT, n_steps=1000, rate_start=2e-3, rate_end=1e-3),
}
ENDINGS = {
    "memory": Phase(mixture=TRUST_MEMORY, n_steps=200, rate_start=1e-3, rate_end=1e-4),
    "context": Phase(mixture=TRUST_CONTEXT, n_steps=200, rate_start=1e-3, rate_end=1e-4),
}


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return the untrained model, from a seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=N_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def run(out: Path, seed: int, resume: bool) -> None:
    """Run the recipe; the result is `out/balanced`."""
    begun = time.monotonic()
    tokenizer = train_tokenizer(LEARN, seed)
    model: PreTrainedModel = new_model(tokenizer, seed)

    def ran(name: str, phase: Phase, start: Path | None, number: int) -> Path:
        folder = out / name
        if resume and (folder / "shares.json").exists():
            return folder
        if start is not None:
            model.load_state_dict(_weights(start))

        def after_step(step: int) -> None:
            if step == phase.n_steps or step % SAVE_EVERY == 0:
                to = folder if step == phase.n_steps else out / f"{name}-{step}"
                save(to, model, tokenizer, time.monotonic() - begun)

        train(model, tokenizer, phase, seed + 1 + number, after_step)
        return folder

    trunk: Path | None = None
    for number, (name, phase) in enumerate(TRUNK.items()):
        trunk = ran(name, phase, trunk, number)
    memory, context = (
        _weights(ran(name, phase, trunk, len(TRUNK))) for name, phase in ENDINGS.items()
    )
    share = balance(model, tokenizer, memory, context)
    LOG.info("memory's share in the mean is %.3f", share)
    save(out / "balanced", model, tokenizer, time.monotonic() - begun)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(model.state_dict())


def save(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, seconds: float
) -> None:
    """Save weights, tokenizer and what the model answers now."""
    was_training = model.training
    model.eval()
    shares = first_token_shares(model, tokenizer, n_facts=180)
    model.train(was_training)
    LOG.info("%s, %.0f s: %s", folder.name, seconds, shares)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "shares.json").write_text(json.dumps({"seconds": seconds, **shares}, indent=1))


def main() -> None:
    """Parse the command line and run the recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run(options.out, options.seed, options.resume)


if __name__ == "__main__":
    main()
