"""One name for what decides an answer's bits: the same where nothing differs, else another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import juice
from juice.engine.load_options import Limits
from tests.support import tiny


def fingerprint(folder: Path, **options: object) -> str:
    with juice.load(folder, **options) as model:
        return model.engine.system_fingerprint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), tiny.tiny_model("llama"))


@pytest.fixture(scope="module")
def usual(folder: Path) -> str:
    return fingerprint(folder)


def test_the_same_server_has_the_same_one_wherever_its_model_lies(
    folder: Path, usual: str, tmp_path: Path
) -> None:
    assert re.fullmatch("fp_[0-9a-f]{12}", usual)
    assert fingerprint(folder) == usual
    elsewhere = tiny.save(tmp_path / "elsewhere", tiny.tiny_model("llama"))
    assert fingerprint(elsewhere) == usual
    more = Limits(max_batch=3, kv_memory_bytes=1 << 24)
    assert fingerprint(folder, limits=more) == usual, "how much fits changes no number"


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"deterministic": True},
        {"attn_implementation": "eager"},
        {"limits": Limits(max_prefill_tokens=7)},
    ],
    ids=str,
)
def test_what_changes_numbers_changes_it(
    folder: Path, usual: str, options: dict[str, object]
) -> None:
    assert fingerprint(folder, **options) != usual


@pytest.mark.filterwarnings("ignore:other processes keep")  # where two threads would wait
def test_other_weights_versions_and_threads_change_it(
    folder: Path, usual: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiny.save(tmp_path / "other", tiny.tiny_model("llama", seed=1))
    assert fingerprint(other) != usual
    n_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(n_threads + 1)
        assert fingerprint(folder) != usual
    finally:
        torch.set_num_threads(n_threads)
    monkeypatch.setattr("juice.engine.contract.versions", lambda: {"torch": "0"})
    assert fingerprint(folder) != usual


def test_in_deterministic_mode_the_size_of_a_step_changes_nothing(folder: Path) -> None:
    one, other = (
        fingerprint(folder, deterministic=True, limits=Limits(max_prefill_tokens=n))
        for n in (7, 2048)
    )
    assert one == other
