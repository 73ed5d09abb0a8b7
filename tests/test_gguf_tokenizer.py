"""Tokenizers of GGUF files, on small vocabularies whose tokens are known by hand.

Against llama.cpp itself, and on whole vocabularies: `integration/real/llama_cpp.py` and
`vocabularies.py`.
"""

from __future__ import annotations

import pytest
from gguf import TokenType

from juice.errors import UnsupportedModelError
from juice.gguf_tokenizer import SPLITS, stop_ids, tokenizer_of
from tests.support.gguf_tokenizers import BYTES, Fields, byte_level, scored


def tokens_in(file: Fields, text: str) -> list[str]:
    """Return a text's tokens as the file spells them, special ones included."""
    ids = tokenizer_of(file)(text)["input_ids"]
    return [file.fields["tokens"][i] for i in ids]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 1234", "!", "\n"]),
        ("smollm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "!", "\n"]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "4", "!\n"]),
        ("smaug-bpe", ["I", "'LL", " pay", " ", "123", "4", "!\n"]),
        ("qwen2", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "!\n"]),
        ("tekken", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "!\n"]),
    ],
)
def test_text_is_split_as_the_file_names_it(pre: str, expected: list[str]) -> None:
    tokenizer = tokenizer_of(byte_level(pre=pre))
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    pieces = [piece for piece, _ in splitter.pre_tokenize_str("I'LL pay 1234!\n")]
    spelled = [piece.replace(" ", "Ġ").replace("\n", "Ċ") for piece in expected]
    assert pieces == spelled


def test_a_piece_that_is_a_token_is_whole_where_the_split_wants_it() -> None:
    """Kills: merges alone, which never reach "abc", for want of the pair "a bc"."""
    merges = ("b c", "a b", "ab c")
    assert tokens_in(byte_level(merges=merges, pre="smaug-bpe"), "abc") == ["a", "bc"]
    assert tokens_in(byte_level(merges=merges, pre="tekken"), "abc") == ["abc"]


def test_no_token_is_beyond_the_vocabulary() -> None:
    """Kills: the end of text that transformers' class for GPT-2 adds to any vocabulary."""
    file = byte_level(pre="qwen2", control=("<|im_end|>",), eos_token_id=256)
    tokenizer = tokenizer_of(file)
    assert len(tokenizer) == 257
    assert max(tokenizer("<|endoftext|>")["input_ids"]) < 256
    assert stop_ids(file, tokenizer) == [256]


def test_control_tokens_are_found_whatever_their_letters() -> None:
    file = byte_level(pre="deepseek-r1-qwen", control=("<｜User｜>",))
    assert tokens_in(file, "a<｜User｜>b") == ["a", "<｜User｜>", "b"]
    assert tokenizer_of(file).decode([256, 64]) == f"<｜User｜>{BYTES[64]}"


@pytest.mark.parametrize("pre", SPLITS)
def test_a_text_begins_as_llama_cpp_begins_it_where_the_file_does_not_say(pre: str) -> None:
    begins = pre not in {"gpt-2", "smollm", "smaug-bpe", "qwen2", "deepseek-r1-qwen"}
    file = byte_level(pre=pre, control=("<s>",), bos_token_id=256)
    assert tokens_in(file, "a") == (["<s>", "a"] if begins else ["a"])
    said = byte_level(pre=pre, control=("<s>",), bos_token_id=256, add_bos_token=not begins)
    assert tokens_in(said, "a") == (["a"] if begins else ["<s>", "a"])


def test_the_best_scored_neighbours_are_merged_first() -> None:
    letters = dict.fromkeys("abc", -100.0)
    file = scored({**letters, "ab": -2.0, "bc": -1.0}, add_space_prefix=False)
    assert tokens_in(file, "abc") == ["<s>", "a", "bc"]
    other = scored({**letters, "ab": -1.0, "bc": -2.0}, add_space_prefix=False)
    assert tokens_in(other, "abc") == ["<s>", "ab", "c"]


def test_a_space_is_before_each_text_also_one_with_spaces_and_after_control_tokens() -> None:
    """Kills: transformers' class for Llama, which adds none where there is one."""
    tokens = {"▁": -9.0, "a": -9.0, "▁a": -1.0, "▁▁": -2.0}
    file = scored(tokens)
    assert tokens_in(file, "a") == ["<s>", "▁a"]
    assert tokens_in(file, " a") == ["<s>", "▁", "▁a"]
    assert tokens_in(file, "a</s>a") == ["<s>", "▁a", "</s>", "▁a"]
    assert tokens_in(scored(tokens, add_space_prefix=False), " a") == ["<s>", "▁a"]
    assert tokenizer_of(file).decode(tokenizer_of(file)(" a</s>")["input_ids"][1:-1]) == " a"


def test_the_users_tokens_are_found_longest_first() -> None:
    """Kills: merging spaces, which splits a run of five into other tokens than Gemma's."""
    spaces = tuple(" " * n for n in range(2, 5))
    file = scored({"▁": -9.0, "a": -9.0}, users=(*spaces, "\n\n"), add_space_prefix=False)
    assert tokens_in(file, "a     a") == ["<s>", "a", "    ", "▁", "a"]
    assert tokens_in(file, "a\n\na") == ["<s>", "a", "\n\n", "a"]
    tokenizer = tokenizer_of(file)
    assert tokenizer.decode(tokenizer("a     a\n\n")["input_ids"][1:]) == "a     a\n\n"


def test_characters_without_a_token_are_bytes() -> None:
    tokens = {f"<0x{byte:02X}>": 0.0 for byte in range(256)}
    assert tokens_in(scored(tokens, add_space_prefix=False), "é") == ["<s>", "<0xC3>", "<0xA9>"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": "gpt2"}, "splits text like 'default', which is not known here; expected gpt-2"),
        ({"model": "gpt2", "pre": "klingon"}, "splits text like 'klingon'"),
        ({"model": "bert"}, "has a tokenizer of the kind 'bert'.*expected gpt2 or llama"),
        ({}, "has a tokenizer of the kind None"),
    ],
)
def test_other_kinds_are_refused_by_name(fields: dict[str, str], expected: str) -> None:
    with pytest.raises(UnsupportedModelError, match=expected):
        tokenizer_of(Fields(**fields))


def test_each_token_has_its_own_score_behind_tokens_alike() -> None:
    """Kills: scores in the order of a vocabulary without doubles, one place too early behind them.

    Merged are "a b" and "b c", of which the first scores better.
    """
    file = scored({"▁": -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "ab": -1.0, "bc": -2.0})
    for field, value in (("tokens", ""), ("scores", 0.0), ("token_type", TokenType.UNUSED)):
        file.fields[field][3:3] = [value, value]
    assert tokens_in(file, "abc") == ["<s>", "▁", "ab", "c"]


def test_all_chat_templates_are_read() -> None:
    default = {"tokenizer.chat_template": "plain"}
    named = {"tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": "with texts"}
    assert tokenizer_of(byte_level(pre="qwen2", **default)).chat_template == "plain"
    both = tokenizer_of(byte_level(pre="qwen2", **default, **named)).chat_template
    assert both == {"default": "plain", "rag": "with texts"}
    assert tokenizer_of(byte_level(pre="qwen2", **named)).chat_template == {"rag": "with texts"}
