"""What cannot be sharded, and where: refused before any weights are read or ranks are left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig

import juice
from juice.engine import Limits
from juice.errors import RequestError, UnsupportedModelError, UsageError
from juice.loading.pretrained import check_shardable
from tests.support import tiny

SIZES = {"vocab_size": 300, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "n_ranks", "reason"),
    [
        (
            LlamaConfig(**SIZES, num_attention_heads=3, num_key_value_heads=3),
            2,
            "3 query heads in layer 0, which 2 ranks",
        ),
        (
            LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=1),
            2,
            "1 key-value heads",
        ),
        (
            LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2),
            4,
            "2 key-value heads in layer 0, which 4 ranks",
        ),
        (tiny.tiny_model("gpt2").config, 2, "no tensor parallel plan"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused_before_its_weights_are_read(
    config: PretrainedConfig, n_ranks: int, reason: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        juice.load(tmp_path, tp=n_ranks)


def test_heads_need_not_divide_where_attention_is_whole_on_every_rank(tmp_path: Path) -> None:
    DeepseekV3Config(
        **SIZES, num_attention_heads=3, num_key_value_heads=3, n_routed_experts=8
    ).save_pretrained(tmp_path)
    check_shardable(tmp_path, 2)


def test_what_would_run_on_only_one_rank_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save(tmp_path, tiny.tiny_model("llama"))
    with pytest.raises(RequestError, match="give its folder"):
        juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer(), tp=2)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="expected auto or cpu"):
            juice.load(folder, tp=2, device="cuda:1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one of torchrun's")
    for tp in (1, 2):
        with pytest.raises(UsageError, match="torchrun"):
            juice.load(folder, tp=tp)
    assert juice.load(folder, device="cpu").loaded.n_ranks == 1


def test_a_load_that_is_refused_leaves_no_rank_behind(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path, tiny.tiny_model("llama"))
    with pytest.raises(RequestError, match="max_model_len"):
        juice.load(folder, tp=2, limits=Limits(max_model_len=100_000))
    assert not torch.distributed.is_initialized()
