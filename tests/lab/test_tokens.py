"""The bundled model's tokenizer, chat template and packing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lab import chat, tokens
from lab.packing import IGNORED, Packer
from lab.recipe import LEARN

MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is the capital of Peru?"},
    {"role": "assistant", "content": "Lima."},
    {"role": "user", "content": "And of Chile?"},
]
DOCUMENTS = [{"text": "Chile has its capital in Santiago."}, {"title": "Peru", "text": "Lima."}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """Return the tokenizer as it is saved and loaded, trained on few documents."""
    folder = tmp_path_factory.mktemp("tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "N_DOCUMENTS", 600)
        tokens.train_tokenizer(LEARN, seed=0).save_pretrained(folder)
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return loaded


def test_training_renders_dialogues_as_the_bundled_tokenizer_does(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rendered = tokenizer.apply_chat_template(MESSAGES, documents=DOCUMENTS, tokenize=False)

    assert rendered == chat.render(MESSAGES, DOCUMENTS)
    assert rendered == (
        "<|begin|><|system|>Be short.<|end|>"
        "<|document|>Chile has its capital in Santiago.<|end|><|document|>Peru\nLima.<|end|>"
        "<|user|>What is the capital of Peru?<|end|><|assistant|>Lima.<|end|>"
        "<|user|>And of Chile?<|end|>"
    )


def test_every_role_is_one_token_and_a_prompt_begins_with_the_begin_token(
    tokenizer: PreTrainedTokenizerFast,
) -> None:

    for token in (chat.BEGIN, chat.END, *chat.ROLES):
        assert len(tokenizer(token, add_special_tokens=False)["input_ids"]) == 1
    assert tokenizer("Lima")["input_ids"][0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokenizer("é 東 \n")["input_ids"][1:]) == "é 東 \n"


def test_packed_documents_are_predicted_as_each_would_be_alone() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    ).eval()
    documents = [torch.randint(50, (n,)).tolist() for n in (7, 3, 9, 6, 2, 8)]
    packer, full = Packer(n_rows=2, length=12), [[0] * 13] * 3
    packed = [rows for d in [*documents, *full] if (rows := packer.add(d)) is not None]

    found = []
    for rows in packed:
        logits = model(rows.tokens, position_ids=rows.positions, use_cache=False).logits
        for row in range(2):
            starts = [i for i, p in enumerate(rows.positions[row].tolist()) if p == 0] + [12]
            for start, end in pairwise(starts):
                targets = rows.targets[row, start:end]
                if not (targets != IGNORED).any():
                    continue
                assert (targets != IGNORED).all()
                tokens = rows.tokens[row, start:end]
                document = [int(tokens[0]), *targets.tolist()]
                found.append(document)
                alone = model(torch.tensor([document[:-1]])).logits[0]
                torch.testing.assert_close(logits[row, start:end], alone)
    assert sorted(found[: len(documents)]) == sorted(documents)
