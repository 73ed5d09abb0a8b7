"""The check at the start refuses every mistake that would silently steer wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.utils.system_utils import get_mp_context

from juice.engine.contract import Engine
from juice.errors import UnsupportedModelError
from tests.engine.vllm import mistakes
from tests.support import tiny
from tests.support.on_vllm import started, wide


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), wide("Llama").build())


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    with mistakes.possible(), started(folder, dtype=request.param) as engine:
        yield engine


@pytest.mark.parametrize("mistake", mistakes.ON_ONE_DEVICE, ids=lambda one: one.__name__)
def test_a_mistake_is_refused(mistake: mistakes.Mistake, engine: Engine) -> None:
    mistakes.assert_refused(engine, mistake)


def test_a_small_mistake_is_refused_in_float32(folder: Path) -> None:
    with mistakes.possible(), started(folder, dtype="float32") as engine:
        mistakes.assert_refused(engine, mistakes.a_slightly_larger_scale)


def test_the_heads_of_another_rank_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with mistakes.possible(), started(folder, tp=2) as engine:
        mistakes.assert_refused(engine, mistakes.the_heads_of_the_first_rank)


def test_a_start_with_a_mistake_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake is one of vLLM's scheduler, whose process, a spawned one, takes plugins."""
    monkeypatch.setattr("vllm.v1.engine.utils.get_mp_context", get_mp_context)
    made = folder.with_name("mistake-0.dist-info")
    made.mkdir()
    (made / "METADATA").write_text("Name: mistake\nVersion: 0\n")
    (made / "entry_points.txt").write_text(
        "[vllm.general_plugins]\n"
        "mistake = tests.engine.vllm.mistakes:a_cache_that_knows_tokens_alone\n"
    )
    monkeypatch.syspath_prepend(folder.parent)
    with pytest.raises(UnsupportedModelError, match="not steered exactly"), started(folder):
        pass
