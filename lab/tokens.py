"""The tokenizer of the bundled model: byte-level BPE with a begin token and the chat template."""

from __future__ import annotations

from itertools import islice

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lab import chat
from lab.corpus import Corpus, Mixture

VOCAB_SIZE, N_POSITIONS, N_DOCUMENTS = 4096, 1024, 60_000


def train_tokenizer(mixture: Mixture, seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on documents of a mixture."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [chat.BEGIN, chat.END, *chat.ROLES]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(Corpus(mixture, seed), N_DOCUMENTS), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{chat.BEGIN} $A",
        pair=f"{chat.BEGIN} $A $B",
        special_tokens=[(chat.BEGIN, tokenizer.token_to_id(chat.BEGIN))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=chat.BEGIN,
        eos_token=chat.END,
        pad_token=chat.END,
        additional_special_tokens=list(chat.ROLES),
        model_max_length=N_POSITIONS,
        chat_template=chat.TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
