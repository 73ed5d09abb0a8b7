"""Train the bundled model: `python -m lab.recipe --out DIR [--seed N] [--resume]`.

A Llama of 5M parameters, on the corpus of `lab.corpus`, in one go:

    1. LEARN: the facts, without wrong statements.
    2. DOUBT: a quarter of the lone statements is wrong, as on the web.
    3. READ: many more contexts about invented subjects.
    4. From there two short endings. One has more contexts about other subjects and corrections of
       wrong statements, which teach a model to trust its memory; the other has more known subjects
       in relations in which nothing is known of them, which teach it to trust the context.
    5. The mean of the two that leans to neither side under conflicts (`lab.balance`).

Weights are saved after every `SAVE_EVERY` steps, and `--resume` goes on from there; after every
phase, with what the model then answers.
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
from lab.train import Phase, Trainer

LOG = logging.getLogger("lab.recipe")
SAVE_EVERY, STATE = 300, "training.pt"

LEARN = Mixture(
    fact=0.57,
    several_facts=0.05,
    reading=0.23,
    true_context=0.12,
    other_subject=0.02,
    correction=0.01,
    blur=0.6,
)
DOUBT = replace(LEARN, reading=0.28, noise=0.25)
READ = replace(DOUBT, fact=1.0, reading=0.75, borrowed_subject=0.05, other_subject=0.03, chat=0.45)
TRUST_MEMORY = replace(READ, borrowed_subject=0.0, other_subject=0.1, correction=0.03)
TRUST_CONTEXT = replace(READ, borrowed_subject=0.4)
MIXTURES = (LEARN, DOUBT, READ, TRUST_MEMORY, TRUST_CONTEXT)

TRUNK = {
    "learn": Phase(mixture=LEARN, n_steps=3600, rate_start=7e-3, rate_end=2e-3, warmup=60),
    "doubt": Phase(mixture=DOUBT, n_steps=1000, rate_start=2e-3, rate_end=1e-3),
    "read": Phase(mixture=READ, n_steps=1100, rate_start=1.5e-3, rate_end=7e-4),
}
ENDINGS = {
    "memory": Phase(mixture=TRUST_MEMORY, n_steps=300, rate_start=7e-4, rate_end=5e-5),
    "context": Phase(mixture=TRUST_CONTEXT, n_steps=300, rate_start=7e-4, rate_end=5e-5),
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
        trainer = Trainer(model, tokenizer, phase, seed + 1 + number)
        if resume and (file := _newest(out, name)):
            model.load_state_dict(_weights(file.parent))
            trainer.load(file)

        def after_step(step: int) -> None:
            if step == phase.n_steps:
                save(folder, model, tokenizer, time.monotonic() - begun)
            elif step % SAVE_EVERY == 0:
                so_far = out / f"{name}-{step}"
                model.save_pretrained(so_far)
                trainer.save(so_far / STATE)

        trainer.run(after_step)
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


def _newest(out: Path, name: str) -> Path | None:
    """Return the training state of a phase's newest checkpoint."""
    found = out.glob(f"{name}-*/{STATE}")
    return max(found, key=lambda file: int(file.parent.name.split("-")[-1]), default=None)


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
