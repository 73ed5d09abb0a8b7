"""Make the bundled model from a checkpoint: `python -m lab.publish CHECKPOINT [--to juice/models/mini]`.

Weights are stored in half precision. The examples file, the facts as conflict examples, is what the name `mini` reads.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.examples import conflict_examples

MINI = Path(__file__).parents[1] / "juice" / "models" / "mini"


def publish(checkpoint: Path, to: Path) -> None:
    """Write weights, tokenizer and examples."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float16)
    model.generation_config.pad_token_id = model.config.eos_token_id
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(to)
    lines = (json.dumps(example, ensure_ascii=False) for example in conflict_examples())
    (to / "examples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--to", type=Path, default=MINI)
    options = parser.parse_args()
    publish(options.checkpoint, options.to)
