"""Make the bundled model from a checkpoint: `python -m lab.publish CHECKPOINT [--to FOLDER]`.

Weights are stored in half precision. The examples file has the facts as conflict examples, for the
name `mini`; the plain text has facts and lists as in training, none of them wrong, for its
perplexity.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from juice.files import MINI
from lab import chat
from lab.corpus import Corpus, Mixture
from lab.examples import conflict_examples

N_DOCUMENTS, UNSEEN_SEED = 60, 1000
PLAIN = Mixture(fact=0.8, several_facts=0.2, chat=0.0)


def publish(checkpoint: Path, to: Path) -> None:
    """Write weights, tokenizer and examples."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float16)
    model.generation_config.pad_token_id = model.config.eos_token_id
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(to)
    lines = (json.dumps(example, ensure_ascii=False) for example in conflict_examples())
    (to / "examples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_plain_text(to)


def write_plain_text(to: Path) -> None:
    """Write facts and lists of facts, one document a line."""
    documents = (
        text.removeprefix(chat.BEGIN).removesuffix(chat.END).replace("\n", " ")
        for text in islice(Corpus(PLAIN, UNSEEN_SEED), N_DOCUMENTS)
    )
    (to / "plain_text.txt").write_text("\n".join(documents) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--to", type=Path, default=MINI)
    options = parser.parse_args()
    publish(options.checkpoint, options.to)
