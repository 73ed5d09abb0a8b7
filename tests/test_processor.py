"""The CPU's part in loading: bfloat16 where it multiplies that, its threads, and its other work."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import nn

import juice
from juice.engine.load_options import LoadOptions
from juice.errors import UsageError
from juice.gguf import GgufFile
from juice.loading import load_model
from juice.placement import choose_dtype
from juice.processor import WeightFirst, bfloat16_unit, put_weights_first
from tests.support import oracle, tiny
from tests.support.commands import invoke
from tests.support.gguf_files import write_gguf
from tests.support.serving import serving

CPU, BFLOAT16 = torch.device("cpu"), torch.bfloat16
NONE = {"avx512_f": True, "avx512_bf16": False, "amx_bf16": False, "architecture": "x86_64"}
AVX512, ARM = {**NONE, "avx512_bf16": True}, {"neon": True, "bf16": True}
AMX = {**AVX512, "amx_bf16": True}
# To a head's part of the residual stream this is so much that bfloat16 loses the part, and float32
# does not; and layer norms do not see it.
TOO_MUCH = 1024.0
MAPPED = Path("/proc/self/maps")  # the libraries of this process, on Linux
# Whether GNU's OpenMP splits PyTorch's operators.
IS_SPLIT = MAPPED.exists() and "libgomp" in MAPPED.read_text()
HAS_BFLOAT16 = pytest.mark.skipif(
    bfloat16_unit() is None, reason="this CPU does not multiply bfloat16, or PyTorch does not say"
)


@pytest.mark.parametrize(
    ("capabilities", "stored", "deterministic", "expected"),
    [
        (AVX512, BFLOAT16, False, (BFLOAT16, "the CPU multiplies bfloat16 (avx512_bf16)")),
        (AMX, BFLOAT16, False, (BFLOAT16, "the CPU multiplies bfloat16 (amx_bf16)")),
        (ARM, BFLOAT16, False, (BFLOAT16, "the CPU multiplies bfloat16 (bf16)")),
        (NONE, BFLOAT16, False, (torch.float32, None)),
        ({}, BFLOAT16, False, (torch.float32, None)),
        (AMX, BFLOAT16, True, (torch.float32, None)),
        (AMX, torch.float32, False, (torch.float32, None)),
        (AMX, torch.float16, False, (torch.float32, None)),
        (AMX, None, False, (torch.float32, None)),
    ],
)
def test_auto_is_bfloat16_where_the_cpu_multiplies_it_and_it_is_stored(
    capabilities: dict[str, Any],
    stored: torch.dtype | None,
    deterministic: bool,
    expected: tuple[torch.dtype, str | None],
) -> None:
    options: Any = {
        "stored": stored, "deterministic": deterministic, "capabilities": capabilities,
    }  # fmt: skip
    assert choose_dtype("auto", CPU, **options) == expected
    assert choose_dtype("auto", torch.device("meta"), **options) == ("auto", None)
    for given in (torch.float32, BFLOAT16):
        named = str(given).removeprefix("torch.")
        assert choose_dtype(named, CPU, **options) == (given, None)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("F32", torch.float32),
        ("F16", torch.float16),
        ("BF16", BFLOAT16),
        ("Q8_0", BFLOAT16),
        ("Q4_1", BFLOAT16),
    ],
)
def test_a_file_holds_whole_weights_or_counts_as_bfloat16(
    kind: str, expected: torch.dtype, tmp_path: Path
) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf",
        tiny.tiny_model("llama"),
        "llama",
        quantization=GGMLQuantizationType[kind],
    )
    assert GgufFile(path).dtype == expected
    by_itself = BFLOAT16 if expected == BFLOAT16 and bfloat16_unit() else torch.float32
    assert juice.load(path, device="cpu").loaded.dtype == by_itself
    assert juice.load(path, device="cpu", deterministic=True).loaded.dtype == torch.float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose weights are stored in bfloat16."""
    return tiny.saved(tmp_path_factory.mktemp("stored") / "model", dtype=BFLOAT16)


@HAS_BFLOAT16
def test_a_bfloat16_folder_loads_and_generates_in_bfloat16_and_says_why(folder: Path) -> None:
    model = juice.load(folder, device="cpu")
    why = f"the CPU multiplies bfloat16 ({bfloat16_unit()})"
    assert (model.description.dtype, model.description.dtype_reason) == ("bfloat16", why)
    ids = list(model.tokenize("abc"))
    expected = oracle.generate(tiny.tiny_model("llama").to(BFLOAT16), ids, {}, 5)[0]
    assert list(model.generate("abc", max_tokens=5, ignore_eos=True)[0].token_ids) == expected
    code, out, _ = invoke("doctor", "--model", str(folder), "--device", "cpu")
    assert code == 0
    assert f"LlamaForCausalLM, bfloat16 on cpu; {why}\n" in out


@HAS_BFLOAT16
def test_the_server_says_why_its_model_is_in_bfloat16(folder: Path) -> None:
    with serving("--model", str(folder), "--device", "cpu", "--threads", "1") as server:
        model = httpx.get(f"{server.url}/info").json()["model"]
        why = f"the CPU multiplies bfloat16 ({bfloat16_unit()})"
        assert (model["dtype"], model["dtype_reason"]) == ("bfloat16", why)
        assert f"juice: in bfloat16: {why}\n" in server.errors()


def test_what_is_asked_for_stays(folder: Path) -> None:
    model = load_model(folder, LoadOptions(device="cpu", dtype="float32"))
    assert (model.dtype, model.dtype_reason) == (torch.float32, None)
    assert load_model("mini", LoadOptions(device="cpu")).dtype == torch.float32


def test_weights_that_are_packed_at_load_stay_beside_float32(folder: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    model = juice.load(folder, device="cpu", quantization="torchao-int8")
    assert (model.description.dtype, model.description.dtype_reason) == ("float32", None)


def too_much_for_bfloat16(folder: Path) -> Path:
    """Write a model, stored in bfloat16, whose heads change nothing in that precision."""
    network = tiny.tiny_model("gpt2")
    for block in network.transformer.h:
        torch.nn.init.constant_(block.attn.c_proj.bias, TOO_MUCH)
    return tiny.save(folder, network.to(BFLOAT16))


@HAS_BFLOAT16
def test_a_model_that_the_check_refuses_in_bfloat16_is_in_float32_with_a_warning(
    tmp_path: Path,
) -> None:
    folder = too_much_for_bfloat16(tmp_path)
    with pytest.warns(UserWarning, match=r"in float32, since bfloat16 was refused: .* no head"):
        model = juice.load(folder, device="cpu")
    assert model.loaded.dtype == torch.float32
    assert model.description.dtype_reason == "the check at load refused bfloat16"
    with pytest.raises(juice.JuiceError, match="no head"):
        juice.load(folder, device="cpu", dtype="bfloat16")


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(0,), (1,), (1, 1), (3,), (2, 8), (4, 4), (17,), (3, 9)])
def test_the_weight_first_gives_the_same_product(shape: tuple[int, ...], has_bias: bool) -> None:
    torch.manual_seed(0)
    layer = WeightFirst(48, 80, bias=has_bias, dtype=BFLOAT16)
    x = torch.randn(*shape, 48, dtype=BFLOAT16)
    expected = torch.einsum("...i,oi->...o", x.double(), layer.weight.double())
    if has_bias:
        expected = expected + layer.bias.double()
    product = layer(x)
    assert (product.shape, product.dtype) == ((*shape, 80), BFLOAT16)
    assert product.is_contiguous()
    # One rounding of the product, not two with a bias.
    torch.testing.assert_close(product.double(), expected, rtol=2**-8, atol=1e-4)


class OtherLinear(nn.Linear):
    """A layer that may compute something else."""


@pytest.mark.parametrize("unit", ["amx_bf16", "avx512_bf16", None])
def test_the_weight_goes_first_in_plain_layers_of_a_cpu_with_amx(
    monkeypatch: pytest.MonkeyPatch, unit: str | None
) -> None:
    monkeypatch.setattr("juice.processor.bfloat16_unit", lambda: unit)
    fetched = nn.Linear(4, 4, dtype=BFLOAT16)
    fetched.forward = fetched.forward
    elsewhere = nn.Linear(4, 4, dtype=BFLOAT16, device="meta")
    others = [nn.Linear(4, 4), OtherLinear(4, 4, dtype=BFLOAT16), fetched, elsewhere]
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4, dtype=BFLOAT16)), *others)
    classes = [type(other) for other in others]
    put_weights_first(model)
    assert isinstance(model[0][0], WeightFirst) is (unit == "amx_bf16")
    assert [type(other) for other in others] == classes


def test_the_weight_goes_first_in_stored_models_alone(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("juice.processor.bfloat16_unit", lambda: "amx_bf16")
    file = write_gguf(tmp_path / "model.gguf", tiny.tiny_model("llama"), "llama")
    for stored in (folder, file):
        model = load_model(stored, LoadOptions(dtype="bfloat16")).model
        assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {WeightFirst}
    network = tiny.tiny_model("llama").to(BFLOAT16)
    with juice.load(network, tokenizer=tiny.tiny_tokenizer()):
        assert not any(isinstance(m, WeightFirst) for m in network.modules())


THREADS_OF_OPERATORS = """
import os, time
import juice, torch

def count():
    return len(os.listdir("/proc/self/task"))

def split():
    torch.ones(2_000_000) * 2  # on all threads of the one that calls it
    return count()

with juice.load("mini", device="cpu", threads=2) as model:
    model.generate("abc", max_tokens=1)
    time.sleep(1)
    idle, alone, generating = count(), split(), []
    model.loaded.model.register_forward_hook(lambda *_: generating.append(split()))
    model.generate("abc", max_tokens=1)
    time.sleep(1)
    print(alone - idle, max(generating) - idle, count() - idle)
"""

THREADS_OF_A_FORWARD = """
import juice, torch
for threads in (None, 1, 2):
    with juice.load("mini", device="cpu", threads=threads) as model:
        look = lambda *_: print(torch.get_num_threads())
        model.loaded.model.register_forward_hook(look)
        model.generate("abc", max_tokens=1)
"""


@pytest.fixture(scope="module")
def printed_on_two_threads() -> list[str]:
    """Return the words that the programs print in a process where PyTorch has two threads.

    What operators do comes first, where no operator has run.
    """
    program = (THREADS_OF_OPERATORS if IS_SPLIT else "") + THREADS_OF_A_FORWARD
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="on one core there is one thread in any case")
def test_the_engine_runs_on_as_many_threads_as_were_asked_for(
    printed_on_two_threads: list[str],
) -> None:
    assert printed_on_two_threads[-3:] == ["2", "1", "2"]


@pytest.mark.skipif(
    (os.cpu_count() or 1) < 2 or not IS_SPLIT,
    reason="PyTorch does not split operators with GNU's OpenMP here",
)
def test_threads_of_the_caller_and_of_the_engine_do_not_outnumber_the_cores(
    printed_on_two_threads: list[str],
) -> None:
    """Where both have a thread to help them, GNU's OpenMP lets all sleep between operators."""
    assert printed_on_two_threads[:-3] == ["1", "1", "0"]


@pytest.mark.parametrize("n_threads", [0, -1, 1_000_000])
def test_threads_that_the_machine_does_not_have_are_refused_in_words(n_threads: int) -> None:
    words = rf"threads is {n_threads}; expected 1 to {os.cpu_count()}, the cores of this machine"
    with pytest.raises(UsageError, match=words):
        juice.load("mini", threads=n_threads)
    code, _, error = invoke("generate", "abc", "--threads", str(n_threads))
    assert code == 2
    assert "the cores of this machine" in error


@pytest.fixture
def on_threads() -> Iterator[Any]:
    """Return what sets PyTorch's threads, until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "getloadavg"), reason="the system has no load average")
def test_a_machine_that_others_keep_busy_is_warned_of_where_threads_wait_for_one_another(
    on_threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load average of many more than the cores, in place of the system's, is that of others."""
    n_cores = os.cpu_count() or 1
    network, options = tiny.tiny_model("llama"), {"tokenizer": tiny.tiny_tokenizer()}

    def warned(n_threads: int, load: float, **more: Any) -> list[str]:
        on_threads(n_threads)
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            juice.load(network, **options, **more).close()
        return [str(warning.message) for warning in caught]

    (busy,) = warned(2, n_cores + 10)
    assert f"other processes keep the {n_cores} cores of this machine busy" in busy
    assert "give --threads" in busy
    assert "\n" not in busy
    assert warned(1, n_cores + 10) == []  # one thread waits for no other
    assert warned(2, n_cores + 10, threads=min(2, n_cores)) == []  # the user has chosen
    assert warned(2, float(n_cores)) == []
