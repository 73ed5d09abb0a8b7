"""Train the bundled model: `python -m lab.train --out DIR`.

A GPT-2 of 3.5M parameters on the corpus of `lab.corpus`, in the phases of `RECIPE`. The learning
rate of a phase is linear between its two ends after `warmup` steps. Rows are packed documents and
start where a document does; a random position offset on half of them trains all 512 positions. A
checkpoint is written every `CHECKPOINT_EVERY` steps, with what the model then answers; `--start
CHECKPOINT --phase N` runs the phases from N on again.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from lab.corpus import Corpus, Mixture
from lab.measure import first_token_shares

LOG = logging.getLogger("lab.train")
END = "<|endoftext|>"
VOCAB_SIZE, N_POSITIONS = 4096, 512
BATCH, LENGTH = 32, 128
CHECKPOINT_EVERY = 35


@dataclass(frozen=True, kw_only=True)
class Phase:
    """`n_steps` on one mixture, the learning rate linear from `rate_start` to `rate_end`."""

    mixture: Mixture
    n_steps: int
    rate_start: float
    rate_end: float
    warmup: int = 0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step of this phase, counted from 0."""
        along = step / self.n_steps
        return (self.rate_start + (self.rate_end - self.rate_start) * along) * min(
            1.0, (step + 1) / (self.warmup + 1)
        )


SPELL = Mixture(
    fact=0.45, reading=0.34, true_context=0.14, other_subject=0.05, correction=0.02, noise=0.25
)
LEARN = Mixture(
    fact=0.45, reading=0.38, true_context=0.14, other_subject=0.02, correction=0.01, noise=0.0
)
DOUBT = Mixture(
    fact=0.42, reading=0.376, true_context=0.2, other_subject=0.003, correction=0.001, noise=0.25
)
SETTLE = Mixture(
    fact=0.42, reading=0.38, true_context=0.2, other_subject=0.0, correction=0.0, noise=0.25
)
RECIPE = (
    Phase(mixture=LEARN, n_steps=1155, rate_start=2e-3, rate_end=1e-3, warmup=150),
    Phase(mixture=DOUBT, n_steps=315, rate_start=6e-4, rate_end=3.1e-4),
    Phase(mixture=SETTLE, n_steps=35, rate_start=3e-4, rate_end=2.3e-4),
)


def train_tokenizer(mixture: Mixture, seed: int) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer on 40,000 documents of a mixture."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(Corpus(mixture, seed), 40_000), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, model_max_length=N_POSITIONS
    )


def new_model(end_id: int, seed: int) -> GPT2LMHeadModel:
    """Return the untrained model, from a seed."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=N_POSITIONS,
        n_embd=192,
        n_layer=6,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end_id,
        eos_token_id=end_id,
    )
    return GPT2LMHeadModel(config)


def rows(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    """Yield rows of LENGTH + 1 tokens: documents with end tokens between, the last cut off."""
    row: list[int] = []
    for document in corpus:
        row += [*tokenizer(document)["input_ids"], tokenizer.eos_token_id]
        if len(row) > LENGTH:
            yield row[: LENGTH + 1]
            row = []


def loss_of(model: GPT2LMHeadModel, batch: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token cross-entropy; batch: [rows, LENGTH + 1], offsets: [rows]."""
    positions = offsets[:, None] + torch.arange(LENGTH)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[:, :-1], position_ids=positions, use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def parameter_groups(model: GPT2LMHeadModel) -> list[dict[str, object]]:
    """Return the optimizer's groups: matrices decay, vectors do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]


def train(out: Path, recipe: tuple[Phase, ...], seed: int, start: Path | None = None) -> None:
    """Run the recipe from scratch or from the weights in `start`; save to `out/step-N`."""
    if start is None:
        tokenizer = train_tokenizer(SPELL, seed)
        model = new_model(tokenizer.eos_token_id, seed)
    else:
        tokenizer = AutoTokenizer.from_pretrained(start)
        model = GPT2LMHeadModel.from_pretrained(start, dtype=torch.float32)
    model.train()
    done, begun = 0, time.monotonic()
    for phase in recipe:
        # Each phase starts from the weights alone, so that any of them can be run again from a
        # checkpoint.
        optimizer = torch.optim.AdamW(parameter_groups(model), betas=(0.9, 0.98))
        stream, rng = rows(Corpus(phase.mixture, seed + 1), tokenizer), Random(seed)
        for step in range(phase.n_steps):
            batch = torch.tensor(list(islice(stream, BATCH)))
            offsets = torch.tensor(
                [rng.choice((0, rng.randrange(N_POSITIONS - LENGTH + 1))) for _ in range(BATCH)]
            )
            loss = loss_of(model, batch, offsets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = phase.rate(step)
            optimizer.step()
            done += 1
            if done % CHECKPOINT_EVERY == 0:
                LOG.info("step %d loss %.3f %.0f s", done, loss.item(), time.monotonic() - begun)
            if done % CHECKPOINT_EVERY == 0 or step == phase.n_steps - 1:
                checkpoint(out / f"step-{done}", model, tokenizer, time.monotonic() - begun)


def checkpoint(
    folder: Path, model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, seconds: float
) -> None:
    """Save weights, tokenizer and what the model answers now."""
    model.eval()
    shares = first_token_shares(model, tokenizer, n_facts=180)
    model.train()
    LOG.info("%s %s", folder.name, shares)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "shares.json").write_text(json.dumps({"seconds": seconds, **shares}, indent=1))


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--start", type=Path, help="weights to start from, with the phases from --phase on"
    )
    parser.add_argument("--phase", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(options.out, RECIPE[options.phase :], options.seed, options.start)


if __name__ == "__main__":
    main()
