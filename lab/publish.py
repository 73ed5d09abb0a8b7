"""Make the bundled model from a checkpoint: `python -m lab.publish CHECKPOINT [--to juice/models/mini]`.

Weights are stored in half precision. The examples file, the facts as conflict examples, is what the
name `mini` reads; the plain text, documents of the training mixture that it was not trained on, is
what its perplexity is measured on.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.corpus import Corpus
from lab.examples import conflict_examples
from lab.train import LEARN

N_DOCUMENTS, UNSEEN_SEED = 60, 1000
MINI = Path(__file__).parents[1] / "juice" / "models" / "mini"


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
    """Write documents without wrong statements, a line each."""
    documents = islice(Corpus(LEARN, UNSEEN_SEED), N_DOCUMENTS)
    (to / "plain_text.txt").write_text("\n".join(documents) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--to", type=Path, default=MINI)
    options = parser.parse_args()
    publish(options.checkpoint, options.to)
