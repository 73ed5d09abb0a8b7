"""What must not start, does not: with the reason, and what to do."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import mistral_common
import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

import juice
from juice.engine.load_options import EngineOptions, Limits, LoadOptions
from juice.engine.request import Request
from juice.engine.vllm.arguments import Layers
from juice.engine.vllm.launch import vllm_engine
from juice.engine.vllm.model import MultiModalCausalLM, MultiModalMoECausalLM, check_rank
from juice.engine.vllm.processes import PROCESSOR, SCHEDULER, check_config, numeric
from juice.engine.vllm.start import check_stages, engine_arguments
from juice.errors import UnsupportedModelError, UsageError
from tests.support import tiny
from tests.support.on_vllm import started, wide
from tests.support.running import Collector

ON_CPU = pytest.mark.skipif(not current_platform.is_cpu(), reason="only CPUs refuse it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), wide("Llama").build())


@pytest.mark.skipif(
    platform.machine() != "x86_64" or "amx_tile" not in Path("/proc/cpuinfo").read_text(),
    reason="the processor has no tile registers",
)
def test_a_process_of_vllm_may_use_the_tile_registers() -> None:
    """Without it about half of the starts in bfloat16 ended with an illegal instruction."""
    code = (
        "from juice.engine.vllm.plugin import register; register(); "
        f"from {__name__} import may_use_tiles; print(may_use_tiles())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "True"


def may_use_tiles() -> bool:
    """Ask Linux whether this process may use the tile registers' data."""
    arch_prctl, arch_get_xcomp_perm, tile_data = 158, 0x1022, 18
    mask = ctypes.c_uint64()
    assert not ctypes.CDLL(None).syscall(arch_prctl, arch_get_xcomp_perm, ctypes.byref(mask))
    return bool(mask.value >> tile_data & 1)


@ON_CPU
def test_deterministic_is_refused_by_name_where_vllm_has_no_kernels_for_it(folder: Path) -> None:
    with pytest.raises(UsageError, match="batch-invariant mode has no kernels for CPUs"):
        juice.load(folder, engine="vllm", deterministic=True)


@pytest.mark.parametrize("before", [None, "0"])
def test_deterministic_is_that_of_one_start_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """Kills: the next model of the process in vLLM's batch-invariant mode, unasked."""
    set_by_vllm = "VLLM_USE_BREAKABLE_CUDAGRAPH"

    def variable() -> str | None:
        return os.environ.get("VLLM_BATCH_INVARIANT")

    def run(*_: object, **__: object) -> str | None:
        if variable() == "1" and set_by_vllm not in os.environ:
            os.environ[set_by_vllm] = "1"
        return variable()

    def start(*, deterministic: bool) -> str | None:
        options = EngineOptions(engine="vllm", deterministic=deterministic)
        return vllm_engine(str(folder), LoadOptions(), options)

    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    monkeypatch.delenv(set_by_vllm, raising=False)
    if before is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", before)
        monkeypatch.setenv(set_by_vllm, before)
    monkeypatch.setattr("juice.engine.vllm.start.has_invariant_mode", lambda: True)
    monkeypatch.setattr("juice.engine.vllm.start.started", run)
    assert start(deterministic=True) == "1"
    assert variable() == start(deterministic=False) == before
    monkeypatch.setattr("juice.engine.vllm.start.has_invariant_mode", lambda: False)
    with pytest.raises(UsageError, match="leave deterministic out"):
        start(deterministic=True)
    assert variable() == os.environ.get(set_by_vllm) == before


def test_the_arguments_that_change_numbers_are_part_of_the_fingerprint() -> None:
    one, other = (
        numeric(AsyncEngineArgs(model=model, max_num_seqs=n, dtype="float32", block_size=32))
        for model, n in (("a", 4), ("b", 8))
    )
    assert one == other == {"dtype": "float32", "block_size": "32"}
    assert numeric(AsyncEngineArgs(model="a", enforce_eager=True)) == {"enforce_eager": "True"}


def test_the_memory_for_keys_and_values_is_that_of_all_ranks() -> None:
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    for given, of_one in ((600, 100), (None, None)):
        arguments = engine_arguments("a", Layers(), Limits(kv_memory_bytes=given), ranks)
        assert arguments["kv_cache_memory_bytes"] == of_one


def test_a_window_in_both_stages_is_refused_with_what_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    check_stages(range(1, 2), n_layers=4, n_stages=2)
    with pytest.raises(UnsupportedModelError, match="layers 0-1, 2-3: choose a window within one"):
        check_stages(range(1, 3), n_layers=4, n_stages=2)


def test_a_rank_refuses_a_window_of_which_it_has_a_part() -> None:
    """What a plain `vllm serve` would steer with companions that begin anew in each stage."""
    for layers in ([], [1, 2]):
        check_rank(layers, range(1, 3), n_stages=2)
    check_rank([1], range(1, 3), n_stages=1)  # another has no attention
    with pytest.raises(UnsupportedModelError, match="has only 1 to 1 of them: choose head sets"):
        check_rank([1], range(1, 3), n_stages=2)


@ON_CPU
def test_stages_on_a_cpu_are_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="use tp"), started(folder, pp=2):
        pass


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"max_num_sequences": 3}, "not an option of vLLM"),
        ({"max_num_seqs": 3}, "--max-batch"),
        ({"speculative_config": {"method": "ngram"}}, "steering is not exact"),
        ({"enable_lora": True}, "steering is not exact"),
        ({"data_parallel_size": 2}, "steering is not exact"),
        ({"block_size": "many"}, "vLLM"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_that_vllm_or_steering_cannot_bear_is_refused(
    folder: Path, given: dict[str, object], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason), started(folder, **given):
        pass


def test_replicas_that_share_experts_and_reports_of_these_are_refused(tmp_path: Path) -> None:
    """Under a plain `vllm serve`, which has them; what JuICE starts itself has no replicas."""
    tiny.save(tmp_path, wide("Mixtral").build())
    given = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64}
    ours = {"scheduler_cls": SCHEDULER, "logits_processors": [PROCESSOR]}
    config = AsyncEngineArgs(model=str(tmp_path), **given, **ours).create_engine_config()
    check_config(config)
    config.parallel_config.data_parallel_size = 2
    with pytest.raises(UnsupportedModelError, match="leave out data parallelism"):
        check_config(config)
    config.parallel_config.data_parallel_size = 1
    config.aux_output_config.enable_return_routed_experts = True
    with pytest.raises(UnsupportedModelError, match="--enable-return-routed-experts"):
        check_config(config)


@pytest.mark.parametrize("refusing", [MultiModalCausalLM, MultiModalMoECausalLM])
def test_a_model_of_more_than_text_is_refused_where_it_would_be_steered(
    refusing: type[MultiModalCausalLM],
) -> None:
    config = VllmConfig(additional_config=Layers(range(4), range(4)).to_config())
    with pytest.raises(UnsupportedModelError, match="images or sound"):
        refusing(vllm_config=config)


def test_a_model_that_the_backend_does_not_take_is_refused_with_vllms_reason(
    tmp_path: Path,
) -> None:
    tiny.save(tmp_path, wide("GPT-J").build())
    with (
        pytest.raises(UsageError, match="'GPTJForCausalLM' is not compatible with vLLM"),
        started(tmp_path),
    ):
        pass


def test_latent_attention_is_refused_with_the_variable_that_helps(tmp_path: Path) -> None:
    tiny.save(tmp_path, wide("DeepSeek-V3").build())
    with pytest.raises(UnsupportedModelError, match="VLLM_MLA_DISABLE=1"), started(tmp_path):
        pass


def test_an_engine_that_was_idle_is_not_stuck_when_work_comes(folder: Path) -> None:
    """Kills: counting from its last step, before a pause longer than any watchdog waits."""
    collector = Collector()
    with started(folder) as engine:
        engine.statistics.at -= 1000
        assert engine.status.heartbeat_age_s == 0
        request = Request.of(prompt_ids=(1, 2, 3), max_tokens=50, ignore_eos=True)
        engine.submit([request], collector)
        assert engine.status.heartbeat_age_s < 100
        collector.wait(1)


def test_the_tokenizer_of_a_model_is_its_folders_beside_mistrals_own_format(tmp_path: Path) -> None:
    """Kills: the tokenizer of mistral-common, which vLLM installs, and which reads no prompt."""
    folder = tiny.save(tmp_path, wide("Mistral").build())
    data = Path(mistral_common.__file__).with_name("data")
    shutil.copy(data / "tekken_240718.json", folder / "tekken.json")
    with juice.load(folder) as model:
        assert model.tokenize("Hello") == tuple(tiny.tiny_tokenizer()("Hello")["input_ids"])
        assert model.generate("Hello", max_tokens=2)
