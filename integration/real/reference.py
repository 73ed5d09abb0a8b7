"""llama.cpp's tokens, weights and log-probabilities of a file: what `llama_cpp.py` compares with.

`python -m integration.real.reference MODEL.gguf ASKED.json ANSWERS.npz` runs in an environment that
has llama-cpp-python and gguf, and needs nothing of JuICE. Keys and values are float32, attention is
the plain one, and a chunk is one batch; so of a float32 file nothing is rounded, except where
llama.cpp itself does: it looks up Gemma's GELU in a table of float16 (`GGML_GELU_FP16`).
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp as api
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, TokenType, dequantize

N_TOP = 20
ROWS = 4096  # of a tensor at a time

Array = np.ndarray[Any, Any]


# Whether the tokens that begin or end a text are added, and names of control tokens read as such.
HOW = {"whole": (True, True), "parsed": (False, True), "as text": (False, False)}


def tokens_of(vocabulary: Any, text: str, *, adds: bool, parses: bool) -> list[int]:
    """Return a text's tokens; `adds` and `parses` as in HOW."""
    content = text.encode()
    found = (api.llama_token * (len(content) + 8))()
    n = api.llama_tokenize(vocabulary, content, len(content), found, len(found), adds, parses)
    assert n >= 0, f"{text!r} has {-n} tokens, more than its bytes"
    return list(found[:n])


def about(vocabulary: Any, path: Path) -> dict[str, Array]:
    """Return the tokens that end an answer, and those that llama.cpp makes control tokens.

    It goes by their looks: `</s>` is one, whatever the file says.
    """
    n = api.llama_vocab_n_tokens(vocabulary)
    reader = GGUFReader(path)
    kinds = reader.get_field("tokenizer.ggml.token_type").contents()
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    control = [
        i
        for i in range(n)
        if api.llama_vocab_get_attr(vocabulary, i) & api.LLAMA_TOKEN_ATTR_CONTROL
    ]
    return {
        "ends": np.array([i for i in range(n) if api.llama_vocab_is_eog(vocabulary, i)], np.int64),
        "made control": np.array([tokens[i] for i in control if kinds[i] != TokenType.CONTROL]),
    }


def log_probabilities(model: Any, ids: Sequence[int], n_threads: int) -> dict[str, Array]:
    """Return what llama.cpp expects after each token but the last.

    Returns:
        `top` and `top_logprobs`, [tokens - 1, N_TOP], the likeliest first, and `next_logprobs`,
        [tokens - 1]: those of the tokens that follow.
    """
    settings = api.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = len(ids)
    settings.n_threads = settings.n_threads_batch = n_threads
    settings.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.type_k = settings.type_v = api.GGML_TYPE_F32
    context = api.llama_init_from_model(model, settings)
    batch = api.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, True
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    assert api.llama_decode(context, batch) == 0, "llama.cpp could not run the tokens"
    top, top_logprobs, next_logprobs = [], [], []
    n_vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    for i, following in enumerate(ids[1:]):
        row = np.ctypeslib.as_array(api.llama_get_logits_ith(context, i), (n_vocabulary,))
        logits = row.astype(np.float64)
        logits -= logits.max()
        logits -= np.log(np.exp(logits).sum())
        best = np.argpartition(-logits, N_TOP)[:N_TOP]
        best = best[np.argsort(-logits[best], kind="stable")]
        top.append(best)
        top_logprobs.append(logits[best])
        next_logprobs.append(logits[following])
    api.llama_batch_free(batch)
    api.llama_free(context)
    return {
        "top": np.array(top),
        "top_logprobs": np.array(top_logprobs),
        "next_logprobs": np.array(next_logprobs),
    }


def difference_of_weights(path: Path) -> dict[str, Array]:
    """Return by how much the two unpack a tensor differently, over its largest weight; the most."""
    library = ctypes.CDLL(str(Path(api.llama_cpp._lib._name).with_name("libggml-base.so")))
    differences = {}
    for tensor in GGUFReader(path).tensors:
        if tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            continue
        kind = tensor.tensor_type.name.lower().replace("_k", "_K")
        unpack = library[f"dequantize_row_{kind}"]
        largest = difference = 0.0
        for start in range(0, len(tensor.data), ROWS):
            block = np.ascontiguousarray(tensor.data[start : start + ROWS])
            ours = dequantize(block, tensor.tensor_type)
            theirs = _unpacked(unpack, block, ours.shape)
            largest = max(largest, float(np.abs(theirs).max()))
            difference = max(difference, float(np.abs(theirs - ours).max()))
        differences[tensor.name] = difference / largest
    return {"weights": np.array(list(differences.values()))}


def _unpacked(unpack: Callable[..., Any], block: Array, shape: tuple[int, ...]) -> Array:
    out = np.empty(shape, np.float32)
    unpack(
        block.ctypes.data_as(ctypes.c_void_p),
        out.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(out.size),
    )
    return out


def main() -> None:
    """Answer what is asked of a file."""
    path, asked, answers = (Path(argument) for argument in sys.argv[1:])
    questions = json.loads(asked.read_text())
    api.llama_backend_init()
    settings = api.llama_model_default_params()
    settings.vocab_only = not questions["chunks"]
    model = api.llama_model_load_from_file(str(path).encode(), settings)
    assert model, f"llama.cpp could not load {path}"
    vocabulary = api.llama_model_get_vocab(model)
    found: dict[str, Array] = {
        "version": np.array(api.__version__),
        "system": np.array(api.llama_print_system_info().decode()),
    }
    found |= about(vocabulary, path)
    for how, (adds, parses) in HOW.items():
        for i, text in enumerate(questions["texts"]):
            ids = tokens_of(vocabulary, text, adds=adds, parses=parses)
            found[f"{how}-{i}"] = np.array(ids, np.int64)
    for i, ids in enumerate(questions["chunks"]):
        of_chunk = log_probabilities(model, ids, questions["threads"])
        found |= {f"{name}-{i}": value for name, value in of_chunk.items()}
    api.llama_model_free(model)
    if questions["weights"]:
        found |= difference_of_weights(path)
    np.savez(answers, allow_pickle=False, **found)


if __name__ == "__main__":
    main()
