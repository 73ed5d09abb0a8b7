"""`make gpu`, on a processor: what it brings, checks and writes, and what it says without a GPU.

Catches a command that ends with 0 without its results, or where a model is not exact; a host whose
vLLM does not find JuICE; and packages that are missing there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from benchmarks import gpu
from tests.support import oracle
from tests.support.tiny import tiny_model

ROOT = Path(__file__).parents[2]
WAYS = ("generate, static batch", "own engine, steered", "two runs, steered")
MAKE = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.long
def test_exactness_and_speed_are_written(tmp_path: Path) -> None:
    out, brought = tmp_path / "results.json", tmp_path / "brought"
    ways = " ".join(f"'{way}'" for way in WAYS)
    options = (
        "--device cpu --dtype bfloat16 --dtypes float32 bfloat16 --architectures GPT-2 "
        f"--rounds 1 --rows 1 4 --at-once 2 --out {out} "
        f"--only {ways}"
    )
    # Of what it brings, JuICE alone: the small packages are here, and need a network.
    done = subprocess.run(
        [
            *("make", "gpu", f"PYTHON={sys.executable}", f"GPU_PACKAGES={brought}"),
            *("SMALL_PACKAGES=", "INSTALL=-m pip install --quiet --no-build-isolation"),
            f"GPU={options}",
        ],
        cwd=ROOT,
        env=MAKE,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (installed,) = distributions(path=[str(brought)])
    (plugin,) = installed.entry_points.select(group="vllm.general_plugins")
    assert plugin.value == "juice.engine.vllm.plugin:register"
    result = json.loads(out.read_text())
    assert {(each["model"], each["dtype"], each["exact"]) for each in result["exactness"]} == {
        (model, dtype, True) for model in ("mini", "GPT-2") for dtype in ("float32", "bfloat16")
    }
    assert all(each["differences"] for each in result["exactness"])
    assert result["machine"]["cpu"]
    (speed,) = result["speed"]
    assert speed["groups"] == [[WAYS[1], WAYS[0]], [WAYS[2], WAYS[0]]]
    assert set(speed["ways"]) == set(WAYS)
    assert speed["not_measured"] == result["not_measured"] == {}
    for way in speed["ways"].values():
        assert way["seconds"]["step 1"] > 0
        assert way["seconds"]["prompts 1"] > 0
        assert way["memory_bytes"] >= 0
    assert "step 4" in speed["ways"][WAYS[0]]["seconds"]
    assert "step 4" not in speed["ways"][WAYS[2]]["seconds"]
    assert "| own engine, steered | " in done.stdout
    assert "4 of 4 exact" in done.stdout


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_fails_is_a_result_of_each_model() -> None:
    found = gpu.exactness("cuda", ["bfloat16"], ["mini", "GPT-2"], n_at_once=2)
    found = sorted(found, key=lambda each: each["model"], reverse=True)
    assert [(each["model"], each["dtype"], each["exact"]) for each in found] == [
        ("mini", "bfloat16", False),
        ("GPT-2", "bfloat16", False),
    ]
    assert all(each["reason"] for each in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 2
    assert "PyTorch finds no GPU here; --device cpu tries the command without one" in done.stderr


def test_the_small_packages_bring_all_that_they_need() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    brought = set(re.findall(r"^SMALL_PACKAGES := (.*)$", makefile, re.MULTILINE)[0].split())
    theirs = needed("torch", "transformers", "huggingface-hub", "safetensors")
    assert needed("llguidance", "pydantic", "typer", "rich") == brought
    assert needed("juice-steering") - theirs - {"juice-steering"} <= brought
    assert not {"torch", "transformers", "numpy"} & brought


def needed(*names: str) -> set[str]:
    """Return packages with all that they need here."""
    found, left = set[str](), list(names)
    while left:
        name = re.sub("[-_.]+", "-", left.pop()).lower()
        if name not in found:
            found.add(name)
            needs = map(Requirement, requires(name) or [])
            left += [r.name for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def test_the_two_runs_take_their_tokens_to_the_model() -> None:
    model = tiny_model("llama").to("meta")

    def look(_module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        raise LookupError(inputs[0].device.type)

    model.get_input_embeddings().register_forward_pre_hook(look)
    with pytest.raises(LookupError, match="meta"):
        oracle.forward(model, [1, 2, 3])
