"""Tokenizers of GGUF files, which give text the tokens that llama.cpp gives it.

A file has a vocabulary with the kind of each token, merges or scores, and the name of a way to
split text. transformers builds one of its own classes out of them, with what that class adds:
an `<|endoftext|>` beyond the vocabulary, a space only where there is none, merges for words that
are whole. So the tokenizer is built here, from the file alone; `integration/real/llama_cpp.py`
compares it with llama.cpp's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from juice.errors import UnsupportedModelError

# Kinds of tokens, as the format numbers them.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
# Tokens that end a turn, whatever the file says of its end of text: from llama.cpp's list.
TURN_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<eos>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
)


class FileOfFields(Protocol):
    """A file with a path, and fields of which some may be absent (None)."""

    path: Path

    def field(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Split:
    """A way to split text before merges.

    Args:
        patterns: Each isolates what it matches, in what the one before it left.
        whole: Whether a piece that is a token is not merged from its characters.
        begins: Whether texts begin with the token for that, where the file does not say.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False


_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = _WORDS + r"|\p{N}{1,3}" + _SIGNS + _SPACES
_QWEN_2 = _WORDS + r"|\p{N}" + _SIGNS + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)
# llama.cpp's names; its "default" is not here, because it splits no known model's text rightly.
SPLITS = {
    "gpt-2": Split((_GPT_2,)),
    "smollm": Split((r"\p{N}", _GPT_2)),
    "llama-bpe": Split((_LLAMA_3,), whole=True, begins=True),
    "llama3": Split((_LLAMA_3,), whole=True, begins=True),
    "llama-v3": Split((_LLAMA_3,), whole=True, begins=True),
    "falcon3": Split((_LLAMA_3,), whole=True, begins=True),
    "smaug-bpe": Split((_LLAMA_3,)),
    "tekken": Split((_TEKKEN,), whole=True, begins=True),
    "qwen2": Split((_QWEN_2,)),
    "deepseek-r1-qwen": Split((_QWEN_2,)),
}


def tokenizer_of(file: FileOfFields) -> PreTrainedTokenizerBase:
    """Return a file's tokenizer, with its chat template.

    Raises UnsupportedModelError for a kind of tokenizer, or a way to split text, not known here.
    """
    kind = file.field("tokenizer.ggml.model")
    if kind == "gpt2":
        split = _split_of(file)
        backend, begins = _byte_level(file, split), split.begins
    elif kind == "llama":
        backend, begins = _sentencepiece(file), True
    else:
        raise UnsupportedModelError(
            f"{file.path.name} has a tokenizer of the kind {kind!r}, which is not known here; "
            "expected gpt2 or llama. Give the model's folder or hub id instead"
        )
    _keep_whole(backend, file)
    tokens = file.field("tokenizer.ggml.tokens")
    named = {
        f"{ours}_token": tokens[number]
        for ours, theirs in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
        if (number := token_id(file, theirs)) is not None
    }
    adds = {end: file.field(f"tokenizer.ggml.add_{end}_token") for end in ("bos", "eos")}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=begins if adds["bos"] is None else adds["bos"],
        add_eos_token=bool(adds["eos"]),
        chat_template=_chat_template(file),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _chat_template(file: FileOfFields) -> str | dict[str, str] | None:
    """Return a file's chat template; by name, where it has others beside the default."""
    default: str | None = file.field("tokenizer.chat_template")
    names = file.field("tokenizer.chat_templates") or ()
    others = {name: file.field(f"tokenizer.chat_template.{name}") for name in names}
    return {**({} if default is None else {"default": default}), **others} if others else default


def token_id(file: FileOfFields, name: str) -> int | None:
    """Return the token that a file calls bos, eos, unknown or the like; None without one."""
    number: int | None = file.field(f"tokenizer.ggml.{name}_token_id")
    if number is None and file.field("tokenizer.ggml.model") == "llama":
        return {"unknown": 0, "bos": 1, "eos": 2}.get(name)
    return number


def stop_ids(file: FileOfFields, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end an answer: of text, of a turn, of a message."""
    named = [token_id(file, name) for name in ("eos", "eot", "eom")]
    whole = tokenizer.get_added_vocab()
    ends = [whole.get(end) for end in TURN_ENDS]
    return sorted({token for token in [*named, *ends] if token is not None})


def _split_of(file: FileOfFields) -> Split:
    name = file.field("tokenizer.ggml.pre") or "default"
    if name not in SPLITS:
        raise UnsupportedModelError(
            f"{file.path.name} splits text like {name!r}, which is not known here; expected "
            f"{', '.join(SPLITS)}. Give the model's folder or hub id instead"
        )
    return SPLITS[name]


def _byte_level(file: FileOfFields, split: Split) -> Tokenizer:
    """Return a tokenizer of bytes, spelled as GPT-2 spells them."""
    merges = [tuple(merge.split(" ", 1)) for merge in file.field("tokenizer.ggml.merges")]
    backend = Tokenizer(BPE(_vocabulary(file), merges, ignore_merges=split.whole))
    isolate = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in split.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*isolate, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: FileOfFields) -> Tokenizer:
    """Return a tokenizer of characters; two neighbours are merged that score best together."""
    vocabulary = _vocabulary(file)
    tokens, scores = (file.field(f"tokenizer.ggml.{name}") for name in ("tokens", "scores"))
    scored = dict(zip(tokens, scores, strict=False))  # of tokens alike the last, as in there
    unknown = token_id(file, "unknown")
    backend = Tokenizer(
        BPE(
            vocabulary,
            generate_merges(vocabulary, scored),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = file.field("tokenizer.ggml.add_space_prefix") is not False
    spell: list[Any] = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*spell, normalizers.Replace(" ", "▁")])
    read: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*read, decoders.Strip(content=" ", left=1)] if has_prefix else read
    )
    return backend


def _vocabulary(file: FileOfFields) -> dict[str, int]:
    return {token: number for number, token in enumerate(file.field("tokenizer.ggml.tokens"))}


def _keep_whole(backend: Tokenizer, file: FileOfFields) -> None:
    """Find control tokens, and those that are the user's, in the text before it is split."""
    kinds = file.field("tokenizer.ggml.token_type") or []
    found: dict[bool, list[AddedToken]] = {True: [], False: []}
    for token, kind in zip(file.field("tokenizer.ggml.tokens"), kinds, strict=False):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            special = kind != USER_DEFINED
            found[special].append(AddedToken(token, normalized=False, special=special))
    backend.add_special_tokens(found[True])
    backend.add_tokens(found[False])
