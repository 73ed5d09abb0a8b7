"""A model's answers by first token: a quick look during training."""

from __future__ import annotations

from random import Random

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lab import chat
from lab.examples import FORMS, Form, conflict_examples, prompts
from lab.relations import RELATIONS

BATCH = 64
Shares = dict[str, dict[str, list[float]]]


def first_token_shares(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, n_facts: int, seed: int = 1
) -> Shares:
    """Return, by form and conflict type, how often each answer's first token is likeliest.

    The two numbers are the shares of the parametric and of the context answer among `n_facts`
    examples, less those where both begin with the same token. `invented` has the share of contexts
    about invented subjects that are believed, by form.
    """
    shares: Shares = {"invented": {}}
    for form in FORMS:
        examples = Random(seed).sample(conflict_examples(form=form), n_facts)
        shares[form] = {}
        for conflict_type in examples[0]["prompts"]:
            tasks = [
                (
                    e["prompts"][conflict_type],
                    _first(tokenizer, e["parametric_answer"][0], form),
                    _first(tokenizer, e["context_answer"], form),
                )
                for e in examples
            ]
            tasks = [task for task in tasks if task[1] != task[2]]
            likeliest = _likeliest(model, tokenizer, [task[0] for task in tasks], form)
            shares[form][conflict_type] = [
                round(
                    sum(t == task[i] for t, task in zip(likeliest, tasks, strict=True))
                    / len(tasks),
                    3,
                )
                for i in (1, 2)
            ]
        shares["invented"][form] = _believed(model, tokenizer, form, n_facts, Random(seed))
    return shares


def _believed(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, form: Form, n: int, rng: Random
) -> list[float]:
    """Return the share of believed contexts about invented subjects: statements, paragraphs."""
    facts = [(relation, relation.invent(rng)) for relation in rng.choices(RELATIONS, k=n)]
    shares = []
    for conflict_type in ("substitution", "coherent"):
        texts = [prompts(r, f, f.answer, rng, form)[conflict_type] for r, f in facts]
        wanted = [_first(tokenizer, f.answer, form) for _, f in facts]
        got = _likeliest(model, tokenizer, texts, form)
        shares.append(round(sum(a == b for a, b in zip(got, wanted, strict=True)) / n, 3))
    return shares


def _first(tokenizer: PreTrainedTokenizerFast, answer: str, form: Form) -> int:
    text = answer if form == "chat" else f" {answer}"
    return int(tokenizer(text, add_special_tokens=False)["input_ids"][0])


@torch.no_grad()
def _likeliest(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[str], form: Form
) -> list[int]:
    """Return the likeliest next token of every text."""
    if form == "chat":
        texts = [f"{chat.render([{'role': 'user', 'content': t}], [])}<|assistant|>" for t in texts]
    else:
        texts = [f"{chat.BEGIN}{text}" for text in texts]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    likeliest = [0] * len(rows)
    for start in range(0, len(rows), BATCH):
        chosen = order[start : start + BATCH]
        width = len(rows[chosen[-1]])
        tokens = torch.tensor([rows[i] + [0] * (width - len(rows[i])) for i in chosen])
        last = torch.tensor([len(rows[i]) - 1 for i in chosen])
        logits = model(tokens, use_cache=False).logits[torch.arange(len(chosen)), last]
        for i, token in zip(chosen, logits.argmax(-1).tolist(), strict=True):
            likeliest[i] = token
    return likeliest
