"""Tokenizers that spell spaces in the ways of real ones, with a few words beside characters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.support import tiny

# Spaces before, after and between words, one and two at a time; and the signs that stand for them.
PIECES = (" ", "  ", " Lima", "Lima", " a", "a", ".", "\n", "Ġ")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(pattern: str | None = None) -> Tokenizer:
    """Return a tokenizer of bytes that spells a space `Ġ`: GPT-2's, or tekken with its pattern."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelled = ["".join(part for part, _ in level.pre_tokenize_str(piece)) for piece in PIECES]
    tokens = dict.fromkeys([tiny.END, *sorted(level.alphabet()), *spelled])
    made = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], ignore_merges=True)
    )
    parts: list[Any] = [level]
    if pattern is not None:
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        parts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), whole]
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(parts), decoders.ByteLevel()
    return made


def sentencepiece(*, adds_space: bool, decoder: decoders.Decoder | None = None) -> Tokenizer:
    """Return a tokenizer that spells a space `▁`: Gemma's, or Llama's, which adds one to a text."""
    spelled = [piece.replace(" ", "▁") for piece in PIECES]
    of_bytes = [f"<0x{byte:02X}>" for byte in range(128, 256)]
    tokens = dict.fromkeys([tiny.END, *of_bytes, "\n", "▁", *map(chr, range(33, 127)), *spelled])
    made = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)},
            merges=[("▁", "a"), ("▁", "▁")],
            byte_fallback=True,
        )
    )
    spell: list[Any] = [normalizers.Prepend("▁")] if adds_space else []
    made.normalizer = normalizers.Sequence([*spell, normalizers.Replace(" ", "▁")])
    read: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    read += [decoders.Strip(content=" ", left=1)] if adds_space else []
    made.decoder = decoder or decoders.Sequence(read)
    return made


SPELLINGS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "tekken": lambda: byte_level(TEKKEN),
    "Llama's SentencePiece": lambda: sentencepiece(adds_space=True),
    "Gemma's SentencePiece": lambda: sentencepiece(adds_space=False),
    "Metaspace": lambda: sentencepiece(adds_space=True, decoder=decoders.Metaspace()),
}
