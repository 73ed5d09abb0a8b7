"""Chat templates for tiny models, a tokenizer with the traps of real ones, and sets found so."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tokenizers import models, processors
from transformers import PreTrainedTokenizerFast

import juice
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Identification
from juice.steered_model import SteeredModel
from tests.support import tiny
from tests.support.conflicts import TYPES

END = tiny.END
PLAIN = (
    "{% for m in messages %}"
    + END
    + "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}"
    + END
    + "assistant:{% endif %}"
)
LINES = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}"
    + END
    + "{{ m['role'] }}\n\n{{ m['content'] | trim }}{% endfor %}{% if add_generation_prompt %}"
    + END
    + "assistant\n\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}"
    + END
    + "{{ m['content'] | trim }}{% endfor %}{% if add_generation_prompt %}"
    + END
    + "{% endif %}"
)
HM = "{% if m['role'] == 'assistant' %}Hm.{% endif %}"
THINKING = LINES.replace("{{ m['content']", HM + "{{ m['content']")
# Each template, what it renders a prompt to, and what is between that and the answer.
TURNS = {
    "plain": (PLAIN, END + "user: {}\n" + END + "assistant:", " "),
    "lines": (LINES, END + "user\n\n{}" + END + "assistant\n\n", ""),
    "marked": (MARKED, END + "{}" + END, ""),
    "thinking": (THINKING, END + "user\n\n{}" + END + "assistant\n\n", ""),
}


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Return the tiny tokenizer with two traits of chat models' tokenizers.

    It begins every text with a start token, and two line ends are one token.
    """
    made = tiny.tiny_tokenizer()
    state = json.loads(made.backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    made.backend_tokenizer.model = models.BPE(
        vocab={**state["vocab"], "ĊĊ": tiny.VOCAB_SIZE - 1}, merges=[*merges, ("Ċ", "Ċ")]
    )
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, 0)]
    )
    made.chat_template = template
    return made


def loaded(template: str | None = None, head_sets: Path | None = None) -> SteeredModel:
    return juice.load(tiny.tiny_model("llama"), tokenizer=tokenizer(template), head_sets=head_sets)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def made_set(
    model: SteeredModel, name: str, found_through: str | None, target: str = "context"
) -> HeadSet:
    """Return a set that was, as it records, found through a template or on plain prompts."""
    provenance = Identification(
        method="probe",
        alphas_plus=(1.0,),
        alphas_minus=(-1.0,),
        n_examples=1,
        seed=0,
        examples_sha256="",
        conflict_types=TYPES,
        top_k=1,
        versions={},
        chat_template_sha256=None if found_through is None else sha256(found_through),
    )
    by_hand = model.make_head_set(
        name=name, target=target, plus=[(1, 2)], minus=[(2, 0)], beta_plus=2.0, beta_minus=-1.0
    )
    return by_hand.model_copy(update={"identification": provenance})
