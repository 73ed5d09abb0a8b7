"""What lm-eval must find, by transformers and the two-run definition, without any code of JuICE.

`python -m integration.clients.lm_eval_oracle`, in the server's environment, which has PyTorch,
reads one JSON job from standard input and writes the numbers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import oracle

ROOT = Path(__file__).parents[2]
MINI = ROOT / "juice" / "models" / "mini"


def heads_of(target: str) -> dict[tuple[int, int], float]:
    """Return beta by (layer, head), read from the head set's file."""
    if target == "none":
        return {}
    found = json.loads((ROOT / "head_sets" / "mini" / target / "head_set.json").read_text())
    heads: dict[tuple[int, int], float] = {}
    juice = found["methods"]["juice"]
    for sign, beta in juice["betas"].items():
        for layer, head in juice["heads"][sign]:
            heads[layer, head] = heads.get((layer, head), 0) + beta
    return heads


def main() -> None:
    """Answer the job."""
    job: dict[str, Any] = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    model = AutoModelForCausalLM.from_pretrained(MINI, dtype="float32").eval()
    heads = heads_of(job["steer"])

    def ids_of(text: str) -> list[int]:
        """Return the tokens, the first of which is the beginning-of-text token."""
        return list(tokenizer(text)["input_ids"])

    def scored(ids: list[int], first: int) -> tuple[float, bool]:
        """Return the log-probability of the tokens from `first` on; whether each is likeliest."""
        logprobs = oracle.steered_logits(model, ids, heads).log_softmax(-1)
        places = range(first, len(ids))
        total = sum(logprobs[i - 1, ids[i]].item() for i in places)
        return total, all(int(logprobs[i - 1].argmax()) == ids[i] for i in places)

    def written(prompt: str) -> str:
        """Return what greedy decoding writes before the full stop, in 16 tokens at most."""
        ids, text = ids_of(prompt), ""
        n_prompt = len(ids)
        while "." not in text and len(ids) < n_prompt + 16:
            token = int(oracle.steered_logits(model, ids, heads)[-1].argmax())
            if token == tokenizer.eos_token_id:
                break
            ids.append(token)
            text = str(tokenizer.decode(ids[n_prompt:]))
        return text.split(".")[0]

    answer = {
        "choices": [
            scored(ids_of(context + continuation), len(ids_of(context)))
            for context, continuation in job["choices"]
        ],
        "rolling": [scored(ids_of(text), 1)[0] for text in job["rolling"]],
        "written": [written(prompt) for prompt in job["written"]],
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
