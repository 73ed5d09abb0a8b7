"""Texts of one character only, through tokenizers of each kind: in time, and nothing is lost.

Merging neighbours, splitting by an expression and normalising can each take the square of a text's
length; a request may send a million characters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from juice.files import MINI
from juice.gguf_tokenizer import tokenizer_of
from juice.model.control_tokens import GUARD
from juice.model.prompts import PromptForm
from tests.support import tiny
from tests.support.gguf_tokenizers import byte_level, scored

N = 200_000
# What takes the square takes minutes: of the processor's time, whatever else runs.
MOST_S = 10.0
RUNS = {"a letter": "a", "a mark": "\u0301", "a line end": "\n", "a space": " ", "a sign": "<"}


def unigram() -> PreTrainedTokenizerFast:
    """Return a tokenizer such as T5's: the likeliest pieces of normalised text."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in "a<\u0301"), ("aa", -4.0)]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def composed() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that composes characters first, as Qwen's does."""
    made = tiny.tiny_tokenizer()
    made.backend_tokenizer.normalizer = normalizers.NFC()
    return made


def pieces() -> PreTrainedTokenizerFast:
    """Return a tokenizer such as Gemma's file has: pieces by score, of a text that is one word."""
    known = {"▁": -3.0, "a": -3.0, "aa": -2.0, "aaaa": -1.0, "▁▁": -2.0, "\u0301": -3.0}
    return tokenizer_of(scored({**known, **{f"<0x{i:02X}>": -9.0 for i in range(256)}}))


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "mini": lambda: AutoTokenizer.from_pretrained(MINI),
    "bytes, composed": composed,
    "unigram": unigram,
    "pieces": pieces,
    **{
        f"bytes, split as {pre}": lambda pre=pre: tokenizer_of(
            byte_level(pre=pre, merges=("a a", "aa aa"), add_bos_token=False)
        )
        for pre in ("gpt-2", "smollm", "llama3", "tekken", "qwen2")
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_run_of_a_character_is_read_in_time_and_whole(kind: str) -> None:
    form = PromptForm(KINDS[kind]())
    for name, character in RUNS.items():
        text = f"e{character * N}e"
        begun = time.process_time()
        ids = form.encode(form.raw(text), add_special_tokens=False)
        assert time.process_time() - begun < MOST_S, name
        read = str(form.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        assert read.lstrip() == text.replace("e\u0301", "é" if "é" in read else "e\u0301"), name


TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"


@pytest.mark.parametrize("beginning", ["", "<|end|>"], ids=["as it is", "guarded"])
def test_other_threads_run_while_a_long_text_is_read(beginning: str) -> None:
    """Kills: a method of the tokenizer that keeps the interpreter's lock all the time."""
    form = PromptForm(AutoTokenizer.from_pretrained(MINI), TEMPLATE)
    text = form.rendered([{"role": "user", "content": beginning + 3 * N * "a"}])
    form.control.prepare()
    turns = [time.monotonic()]
    reading = threading.Thread(target=lambda: form.encode(text))
    reading.start()
    while reading.is_alive():
        reading.join(0.001)
        turns.append(time.monotonic())
    longest = max(after - before for before, after in pairwise(turns))
    assert longest < (turns[-1] - turns[0]) / 2


@pytest.mark.parametrize("character", [*RUNS.values(), GUARD], ids=ascii)
def test_a_long_run_in_a_chat_is_guarded_in_time(character: str) -> None:
    form = PromptForm(AutoTokenizer.from_pretrained(MINI), TEMPLATE)
    text = f"<|end|>{character * N}e"
    begun = time.process_time()
    ids = form.encode(form.rendered([{"role": "user", "content": text}]))
    assert time.process_time() - begun < MOST_S
    shown = form.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert shown == f"<|user|>{text}<|end|><|assistant|>"
